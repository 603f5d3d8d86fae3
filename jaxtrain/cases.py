"""The parity case of an imported model. parity is above jaxtrain, and provides the function when it is imported."""

from collections.abc import Callable
from typing import Any

from jaxtrain.errors import UserError

_PROVIDED: list[Callable[..., Any]] = []


def provide(make_case: Callable[..., Any]) -> None:
    """Let `make_case(model, name, …)` be what `ImportedModel.case` calls."""
    _PROVIDED[:] = [make_case]


def case_of(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the parity case of an imported model.

    Raises:
      UserError: parity was not imported.
    """
    if not _PROVIDED:
        raise UserError("a case is for parity, which is not imported: import parity before model.case()")
    return _PROVIDED[0](model, name, *args, **kwargs)
