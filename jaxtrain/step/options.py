"""Validation of the options of `train_step`."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.step.mistakes import accepts, is_transformation, signature_of


def check_options(
    *,
    accumulate: Any,
    clip_norm: Any,
    clip_value: Any,
    frozen: Any,
    ema: Any,
    remat: Any,
    loss_scale: Any,
    hooks: Any,
    allow_recompile: Any,
    gradient_sums: Any,
    reshard_after: Any,
    pipeline_chunks: Any,
) -> None:
    """Raise `UserError` for an option of another type, or out of range."""
    if not callable(accumulate) and (not _is_int(accumulate) or accumulate < 1):
        raise UserError(f"accumulate must be an integer of at least 1, or a schedule, got {accumulate!r}")
    for name, bound in {"clip_norm": clip_norm, "clip_value": clip_value}.items():
        if bound is not None and not (_is_real(bound) and bound > 0):
            raise UserError(f"{name} must be positive, got {bound!r}: use None for no clipping")
    if not callable(frozen):
        example = frozen if isinstance(frozen, str) else next((x for x in _items(frozen) if isinstance(x, str)), "head")
        raise UserError(
            f"frozen must be a function of a parameter's path, got {frozen!r}: "
            f"use lambda path: path.startswith({example!r})"
        )
    if not accepts(frozen, 1):
        got = signature_of(frozen)
        raise UserError(f"frozen must take one argument, a parameter's path, got {got}: remove the others")
    if ema is not None and not (_is_real(ema) and 0 <= ema < 1):
        raise UserError(f"ema must be in [0, 1), got {ema!r}: use None for no average")
    if not isinstance(remat, str):
        raise UserError(f"remat must be a string, got {remat!r}: use 'full' to rematerialize, or 'none'")
    if loss_scale is not None and not is_transformation(loss_scale):
        remedy = "use None for the precision's default, or jaxtrain.dynamic_loss_scale()"
        if _is_real(loss_scale):
            remedy = f"use jaxtrain.static_loss_scale({loss_scale})"
        raise UserError(f"loss_scale must be a loss scaler, got {loss_scale!r}: {remedy}")
    if hooks is not None and not (isinstance(hooks, Mapping) and all(map(callable, hooks.values()))):
        raise UserError(
            f"hooks must map parameter paths or checkpoint_names to functions, got {hooks!r}: "
            "use {'head/kernel': lambda grad: ...}"
        )
    if allow_recompile is not None and not (_is_int(allow_recompile) and allow_recompile >= 0):
        raise UserError(
            f"allow_recompile must be an integer of at least 0, got {allow_recompile!r}: "
            "use 0 to allow none, or None for any number"
        )
    if gradient_sums not in ("whole", "sharded"):
        raise UserError(f"gradient_sums must be 'whole' or 'sharded', got {gradient_sums!r}: use 'whole'")
    if reshard_after not in ("forward", "window"):
        raise UserError(f"reshard_after must be 'forward' or 'window', got {reshard_after!r}: use 'forward'")
    if not _is_int(pipeline_chunks) or pipeline_chunks < 1:
        raise UserError(f"pipeline_chunks must be an integer of at least 1, got {pipeline_chunks!r}: use 1")


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    return not isinstance(x, bool | str) and hasattr(x, "__float__")


def _items(x: Any) -> Any:
    return x if isinstance(x, list | tuple | set | frozenset) else ()
