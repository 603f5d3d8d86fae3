"""The options of `train_step`, with their bounds."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import optax

from jaxtrain.errors import UserError
from jaxtrain.fields import Bound, bounds
from jaxtrain.passes import Hook, Policy
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.step.accumulate import WindowSchedule
from jaxtrain.step.checks.mistakes import accepts, is_transformation, signature_of

CHANGEABLE: Mapping[str, Any] = {"changeable": True}
"""Metadata of an option that a resumed run may change: the numbers of the run are the same."""


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    return not isinstance(x, bool | str) and hasattr(x, "__float__")


def _one_of(*values: str) -> Bound:
    names = " or ".join(map(repr, values))
    return Bound(lambda x: isinstance(x, str) and x in values, f"be {names}", f"use {values[0]!r}")


_MICRO_BATCHES = Bound(lambda x: callable(x) or (_is_int(x) and x >= 1), "be an integer of at least 1, or a schedule")
_CLIPPING = Bound(lambda x: x is None or (_is_real(x) and x > 0), "be positive", "use None for no clipping")
_DECAY = Bound(lambda x: x is None or (_is_real(x) and 0 <= x < 1), "be in [0, 1)", "use None for no average")
_NAME = Bound(lambda x: isinstance(x, str), "be a string", "use 'full' to rematerialize, or 'none'")
_COMPILATIONS = Bound(
    lambda x: x is None or (_is_int(x) and x >= 0),
    "be an integer of at least 0",
    "use 0 to allow none, or None for any number",
)
_CHUNKS = Bound(lambda x: _is_int(x) and x >= 1, "be an integer of at least 1", "use 1")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of `train_step`, which says what each means.

    A `jaxtrain.Recipe` has fields of the same names.
    """

    precision: str | Policy = "fp32"
    accumulate: Annotated[int | WindowSchedule, _MICRO_BATCHES] = field(default=1, metadata=CHANGEABLE)
    clip_norm: Annotated[float | None, _CLIPPING] = None
    clip_value: Annotated[float | None, _CLIPPING] = None
    frozen: Frozen = none_frozen
    ema: Annotated[float | None, _DECAY] = None
    remat: Annotated[str, _NAME] = "none"
    unroll: bool = False
    loss_scale: optax.GradientTransformation | None = None
    hooks: Mapping[str, Hook] | None = None
    allow_recompile: Annotated[int | None, _COMPILATIONS] = field(default=None, metadata=CHANGEABLE)
    deterministic: bool = False
    gradient_sums: Annotated[str, _one_of("whole", "sharded")] = field(default="whole", metadata=CHANGEABLE)
    reshard_after: Annotated[str, _one_of("forward", "window")] = field(default="forward", metadata=CHANGEABLE)
    pipeline_chunks: Annotated[int, _CHUNKS] = field(default=1, metadata=CHANGEABLE)

    def check(self) -> None:
        """Raise `UserError` for an option of another type, or out of bounds."""
        for name, found in bounds(StepOptions).items():
            for bound in found:
                bound.check(name, getattr(self, name))
        _check_frozen(self.frozen)
        _check_loss_scale(self.loss_scale)
        _check_hooks(self.hooks)


def option_names(*, changeable: bool = False) -> list[str]:
    """Return the names of all options, or of those that a resumed run may change."""
    fields = dataclasses.fields(StepOptions)
    return [x.name for x in fields if not changeable or x.metadata.get("changeable")]


def _check_frozen(frozen: Any) -> None:
    if not callable(frozen):
        example = frozen if isinstance(frozen, str) else next((x for x in _items(frozen) if isinstance(x, str)), "head")
        raise UserError(
            f"frozen must be a function of a parameter's path, got {frozen!r}: "
            f"use lambda path: path.startswith({example!r})"
        )
    if not accepts(frozen, 1):
        got = signature_of(frozen)
        raise UserError(f"frozen must take one argument, a parameter's path, got {got}: remove the others")


def _check_loss_scale(loss_scale: Any) -> None:
    if loss_scale is not None and not is_transformation(loss_scale):
        remedy = "use None for the precision's default, or jaxtrain.dynamic_loss_scale()"
        if _is_real(loss_scale):
            remedy = f"use jaxtrain.static_loss_scale({loss_scale})"
        raise UserError(f"loss_scale must be a loss scaler, got {loss_scale!r}: {remedy}")


def _check_hooks(hooks: Any) -> None:
    if hooks is not None and not (isinstance(hooks, Mapping) and all(map(callable, hooks.values()))):
        raise UserError(
            f"hooks must map parameter paths or checkpoint_names to functions, got {hooks!r}: "
            "use {'head/kernel': lambda grad: ...}"
        )


def _items(x: Any) -> Any:
    return x if isinstance(x, list | tuple | set | frozenset) else ()
