"""The tensors that a function's code can read: those of its own module, or of the layer of a loop."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.torch_import.source.expressions import Expr, call
from jaxtrain.torch_import.source.identifiers import relative_to


class Scope(NamedTuple):
    """Trees of tensors by the path of the module they belong to.

    Attributes:
      trees: By path, the names of the dicts with the tensors of a module: of its "params" and of its "buffers".
    """

    trees: Mapping[str, Mapping[str, str]]

    def find(self, path: str) -> tuple[Mapping[str, str], str] | None:
        """Return the dicts that contain the tensors at a path, and the path in them; None without."""
        for base, names in self.trees.items():
            if (relative := relative_to(path, base)) is not None:
                return names, relative
        return None

    def tensor(self, kind: str, name: str) -> Expr | None:
        """Return the expression of a tensor, "params" or "buffers" by kind; None for one from elsewhere."""
        found = self.find(name)
        return None if found is None else Expr(f'{found[0][kind]}["{found[1]}"]')

    def tree(self, kind: str, path: str) -> Expr | None:
        """Return the expression of the dict of a module's tensors; None for a module from elsewhere."""
        found = self.find(path)
        if found is None:
            return None
        name, relative = Expr(found[0][kind]), found[1]
        return call("of", name, relative) if relative else name


def own(path: str | None) -> Scope:
    """Return the scope of the function of a module; None for one whose tensors are arguments."""
    return Scope({} if path is None else {path: {"params": "params", "buffers": "buffers"}})
