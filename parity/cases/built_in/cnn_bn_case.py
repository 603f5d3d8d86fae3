"""A convolutional classifier with BatchNorm against `torch.nn.Sequential`."""

from typing import Any

from flax import nnx
from torch.nn import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, Module, ReLU, Sequential

import jaxtrain
from jaxtrain.losses import cross_entropy
from jaxtrain.models import CNN, functional_with_state, set_batch_norm_groups
from jaxtrain.models.cnn import torch_buffers, torch_names
from parity.case import AdamW, Case
from parity.cases.built_in import image_batches
from parity.cases.built_in.cnn_case import torch_loss

SHAPE = (10, 10, 3)


def case(dropout: float = 0.0, groups: int = 1) -> Case:
    """Return convolution 3→16, BatchNorm, ReLU, `dropout`, linear, in training mode; running statistics are compared as
    well.

    JAX computes the statistics over `groups` of rows, as that many ranks of DistributedDataParallel do.
    """
    apply, params_like, state_like = functional_with_state(
        nnx.eval_shape(
            lambda: set_batch_norm_groups(
                CNN(SHAPE, width=16, batch_norm=True, dropout=dropout, rngs=nnx.Rngs(0)), groups
            )
        )
    )

    def loss_fn(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[jaxtrain.Loss, dict[str, Any], Any]:
        logits, model_state = apply(params, model_state, batch["image"], rng is not None, rng)
        losses = cross_entropy(logits, batch["label"])
        return jaxtrain.Loss(losses.sum(), weight=len(losses)), {}, model_state

    return Case(
        name="cnn-bn",
        torch_model=lambda: _torch_model(dropout),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(SHAPE, width=16, batch_norm=True),
        batch=image_batches.images(*SHAPE),
        rows=16,
        # The bias before a BatchNorm has gradient 0 but for rounding, of which the default eps makes steps.
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=5.5,
        state_like=state_like,
        buffers=torch_buffers(),
    )


def _torch_model(dropout: float) -> Module:
    # One module with the ReLU, so that the names do not depend on the dropout.
    activation = Sequential(ReLU(), Dropout(dropout))
    return Sequential(Conv2d(3, 16, 3), BatchNorm2d(16), activation, Flatten(), Linear(16 * 8 * 8, 10))
