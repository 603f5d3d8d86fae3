"""Transforms for programs that are compiled for a GPU."""

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.program import rewrite

_GPU = ("gpu", "cuda", "rocm")


def is_gpu(platform: str | None) -> bool:
    """Return whether a platform is a GPU; None is that of the default backend.

    >>> is_gpu("cuda"), is_gpu("cpu")
    (True, False)
    """
    return (platform or jax.default_backend()) in _GPU


def transform_on_gpu(
    fn: Callable[..., Any], rule: rewrite.Rule, platform: str | None, where: rewrite.Where | None = None
) -> Callable[..., Any]:
    """Apply `rule` to `fn` if it is compiled for a GPU."""
    return on_gpu(fn, rewrite.transform(fn, rule, where), platform)


def on_gpu(fn: Callable[..., Any], rewritten: Callable[..., Any], platform: str | None) -> Callable[..., Any]:
    """Call `rewritten` if it is compiled for a GPU, and `fn` if not."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (rewritten if is_gpu(platform) else fn)(*args, **kwargs)

    return chosen
