"""A perceptron against `torch.nn.Sequential`."""

from flax import nnx
from torch.nn import Dropout, Flatten, Linear, Module, ReLU, Sequential

from jaxtrain.models import MLP, functional
from jaxtrain.models.mlp import torch_names
from parity.case import AdamW, Case
from parity.cases.built_in.image_batches import images, loss_fn, torch_loss


def case(dropout: float = 0.0, side: int = 28, hidden: int = 512) -> Case:
    """Return the MLP 784-512-10 on 28×28 images, or a smaller one, with `dropout` after the ReLU."""
    pixels = side * side
    apply, params_like = functional(nnx.eval_shape(lambda: MLP((pixels, hidden, 10), dropout, rngs=nnx.Rngs(0))))
    return Case(
        name="mlp",
        torch_model=lambda: _torch_model(dropout, pixels, hidden),
        torch_loss=torch_loss,
        loss_fn=loss_fn(apply),
        params_like=params_like,
        names=torch_names(2),
        batch=images(side, side),
        rows=64,
        optimizer=AdamW(lr=1e-2, weight_decay=0.1),
        clip_norm=2.5,
    )


def _torch_model(dropout: float, pixels: int, hidden: int) -> Module:
    # One module with the ReLU, so that the names do not depend on the dropout.
    return Sequential(Flatten(), Linear(pixels, hidden), Sequential(ReLU(), Dropout(dropout)), Linear(hidden, 10))
