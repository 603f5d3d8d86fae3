"""A perceptron against `torch.nn.Sequential`."""

from flax import nnx
from torch.nn import Dropout, Flatten, Linear, Module, ReLU, Sequential

from jaxtrain.models import MLP, functional
from jaxtrain.models.mlp import torch_names
from parity.case import AdamW, Case
from parity.cases.classification import images, loss_fn, torch_loss


def case(dropout: float = 0.0) -> Case:
    """784-512-10 on 28×28 images, with `dropout` behind the ReLU."""
    apply, params_like = functional(nnx.eval_shape(lambda: MLP((784, 512, 10), dropout, rngs=nnx.Rngs(0))))
    return Case(
        name="mlp",
        torch_model=lambda: _torch_model(dropout),
        torch_loss=torch_loss,
        loss_fn=loss_fn(apply),
        params_like=params_like,
        names=torch_names(2),
        batch=images(28, 28),
        rows=64,
        optimizer=AdamW(lr=1e-2, weight_decay=0.1),
        clip_norm=2.5,
    )


def _torch_model(dropout: float) -> Module:
    # One module with the ReLU, so that the names do not depend on the dropout.
    return Sequential(Flatten(), Linear(784, 512), Sequential(ReLU(), Dropout(dropout)), Linear(512, 10))
