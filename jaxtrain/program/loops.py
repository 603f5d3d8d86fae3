"""Loops whose length is known only at run time, and the most that they run, which a compiled program does not say."""

import re
from contextlib import AbstractContextManager

import jax

_TIMES = re.compile(r"\bat_most_(\d+)_times\b")


def at_most(times: int) -> AbstractContextManager[None]:
    """Return a scope for a loop, in which the costs of compiled programs find the most that it runs.

    Args:
      times: The largest number of iterations.

    Example:
      >>> import jax.numpy as jnp
      >>> def powers(x, n):
      ...     with at_most(5):
      ...         return jax.lax.fori_loop(0, n, lambda i, y: y @ x, x)
      >>> text = jax.jit(powers).lower(jnp.ones((2, 2)), 3).compile().as_text()
      >>> most_times(text)
      5
    """
    return jax.named_scope(f"at_most_{times}_times")


def most_times(op_name: str) -> int | None:
    """Return the number in the innermost scope `at_most` of an operation; None if it is in none."""
    found = _TIMES.findall(op_name)
    return int(found[-1]) if found else None
