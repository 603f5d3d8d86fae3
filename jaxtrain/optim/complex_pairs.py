"""Complex parameters, which optimizers update as pairs of real numbers, as PyTorch's do (`torch.view_as_real`)."""

from collections.abc import Callable
from typing import Any

import optax

from jaxtrain.optim.preprocessing import Mask
from jaxtrain.step import as_complex, as_real, refuse_complex

REAL_ONLY = ("adafactor", "muon", "adamw8bit", "adam8bit", "sgd8bit")
"""Optimizers whose counterparts take no complex parameters."""


def with_complex(
    name: str, make: Callable[[Mask], optax.GradientTransformation], mask: Mask
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of real parameters as one that also takes complex ones.

    Its gradients are PyTorch's, ∂L/∂re + i ∂L/∂im. Its state has a last axis of two where a parameter is complex.

    Args:
      name: Its name.
      make: From a mask to the optimizer.
      mask: What decays; a function is given the parameters as they are.
    """
    given: list[Any] = []

    def of_given(pairs: Any) -> Any:
        del pairs
        return mask(given[-1])  # type: ignore[misc]

    optimizer = optax.with_extra_args_support(make(of_given if callable(mask) else mask))

    def init(params: Any) -> Any:
        if name in REAL_ONLY:
            refuse_complex(params, name, "put it in another group, by jaxtrain.optim.groups")
        return call(params, lambda: optimizer.init(as_real(params)))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        pairs = None if params is None else as_real(params)
        updates, new = call(grads, lambda: optimizer.update(as_real(grads), state, pairs, **extra))
        return as_complex(updates, grads), new

    def call(tree: Any, fn: Callable[[], Any]) -> Any:
        given.append(tree)
        try:
            return fn()
        finally:
            given.pop()

    return optax.GradientTransformationExtraArgs(init, update)
