"""The case of a bare PyTorch module: a function of a user's file that returns a module and an example batch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from parity.case import Case
from parity.cases.imported import imported_case, with_fresh_weights

if TYPE_CHECKING:
    from jaxtrain.torch_import import ImportedModel

Factory = Callable[[], tuple[Any, Any]]
"""Returns (module, example batch), as `jaxtrain.from_torch` takes them."""


def is_module_with_example(found: Any) -> bool:
    """Whether `found` is what a `Factory` returns."""
    return isinstance(found, tuple) and len(found) == 2 and hasattr(found[0], "named_parameters")


def module_case(name: str, factory: Factory) -> Case:
    """Import a module, and return its case with the default loss, batches and optimizer of `ImportedModel.case`.

    Args:
      name: Name in reports.
      factory: Creates the module, with new weights, and the example batch.

    Raises:
      UserError: The module cannot be imported.
    """
    return imported(name, factory)[1]


def imported(name: str, factory: Factory, *, unroll: bool = False) -> tuple["ImportedModel", Case]:
    """Return the model of a factory and its case, as `module_case`; `unroll` is that of `from_torch`."""
    from jaxtrain.torch_import import from_torch

    model = from_torch(*factory(), unroll=unroll)
    return model, with_fresh_weights(imported_case(model, name), lambda: factory()[0])
