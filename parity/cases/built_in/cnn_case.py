"""A convolutional classifier against `torch.nn.Sequential`."""

from collections.abc import Mapping

from flax import nnx
from torch import Tensor
from torch.nn import Conv2d, Dropout, Flatten, Linear, Module, ReLU, Sequential

from jaxtrain.models import CNN, functional
from jaxtrain.models.cnn import torch_names
from parity.case import AdamW, Case
from parity.cases.built_in import image_batches


def case(dropout: float = 0.0) -> Case:
    """Return convolution 3→16, ReLU, `dropout`, linear. Batches are [B, H, W, C], as in JAX."""
    model = nnx.eval_shape(lambda: CNN((32, 32, 3), width=16, dropout=dropout, rngs=nnx.Rngs(0)))
    apply, params_like = functional(model)
    return Case(
        name="cnn",
        torch_model=lambda: _torch_model(dropout),
        torch_loss=torch_loss,
        loss_fn=image_batches.loss_fn(lambda params, image, rng: apply(params, image, rng is not None, rng)),
        params_like=params_like,
        names=torch_names((32, 32, 3), width=16),
        batch=image_batches.images(32, 32, 3),
        rows=16,
        optimizer=AdamW(lr=1e-3, weight_decay=0.1),
        clip_norm=15.0,
    )


def _torch_model(dropout: float) -> Module:
    # One module with the ReLU, so that the names do not depend on the dropout.
    return Sequential(Conv2d(3, 16, 3), Sequential(ReLU(), Dropout(dropout)), Flatten(), Linear(16 * 30 * 30, 10))


def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the cross-entropy of `model` on [B, H, W, C] images."""
    return image_batches.torch_loss(model, {**batch, "image": batch["image"].permute(0, 3, 1, 2)})
