"""A perceptron against `torch.nn.Sequential`."""

from flax import nnx
from torch.nn import Flatten, Linear, Module, ReLU, Sequential

from jaxtrain.models import MLP, functional
from jaxtrain.models.mlp import torch_names
from parity.case import AdamW, Case
from parity.cases.classification import images, loss_fn, torch_loss


def case() -> Case:
    """784-512-10 on 28×28 images."""
    apply, params_like = functional(nnx.eval_shape(lambda: MLP((784, 512, 10), rngs=nnx.Rngs(0))))
    return Case(
        name="mlp",
        torch_model=_torch_model,
        torch_loss=torch_loss,
        loss_fn=loss_fn(apply),
        params_like=params_like,
        names=torch_names(2),
        batch=images(28, 28),
        rows=64,
        optimizer=AdamW(lr=1e-2, weight_decay=0.1),
        clip_norm=2.5,
    )


def _torch_model() -> Module:
    return Sequential(Flatten(), Linear(784, 512), ReLU(), Linear(512, 10))
