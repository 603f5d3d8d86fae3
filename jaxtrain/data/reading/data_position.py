"""Positions in data, which a checkpoint holds as JSON."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError


def check_position(state: Mapping[str, Any], order: Mapping[str, Any]) -> None:
    """Check that a saved position belongs to data of the same order.

    Args:
      state: The saved position.
      order: What determines the order of the data, by name.

    Raises:
      UserError: An entry of the order is absent from the position, or differs.

    Example:
      >>> check_position({"next_batch": 3, "seed": 1}, {"seed": 0})
      Traceback (most recent call last):
      jaxtrain.errors.UserError: the data position was saved with seed 1, not 0: resume with seed 1 or start a new run
    """
    for name, here in order.items():
        if name not in state:
            raise UserError(
                f"the data position was saved for another kind of data, without {name}: resume with the same data or"
                " start a new run"
            )
        if state[name] != here:
            raise UserError(
                f"the data position was saved with {name} {state[name]}, not {here}:"
                f" resume with {name} {state[name]} or start a new run"
            )
