"""A deliberate bug: one convention of PyTorch implemented wrongly, in the smallest case that can show it."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from parity.case import Case

if TYPE_CHECKING:
    from parity.divergence import Divergence

Patch = Callable[[], AbstractContextManager[Any]]


def patched(function: Callable[..., Any], wrong: Any, within: ModuleType | None = None) -> Patch:
    """Return a patch that replaces `function` by `wrong` while it is entered.

    The function is given by reference, so that renaming it fails in the type checker or at import, not during a run.

    Args:
      function: Function or class to replace.
      wrong: Its replacement.
      within: Module whose name for `function` is replaced; None for the module that defines it.

    Returns:
      A function without arguments that creates the context manager.

    Raises:
      AttributeError: `within` does not know `function` under its own name.
    """
    module, name = within or sys.modules[function.__module__], function.__name__
    if getattr(module, name, None) is not function:
        raise AttributeError(f"{module.__name__} has no {name} that is {function!r}")
    return lambda: mock.patch.object(module, name, wrong)


@dataclass(frozen=True)
class Mutant:
    """A deliberate bug and the case without it.

    A mutant without a stage shows only where nothing is located: over the micro-batches of a window, or in a low
    precision.

    Attributes:
      name: Name, which says what is wrong.
      case: Creates the case with the bug, which may be present only while `patch()` is entered.
      clean: Creates the case without the bug. Mutants that share this object share its verdict.
      stage: Pattern of the stage of `parity.divergence.Divergence` in which it is located.
      torch: Pattern of PyTorch's operation.
      lines: The function in which JAX's line is; None for any line.
      patch: Context of the bug.
      around: Context of both cases.
      settings: Settings of `parity.check`.
    """

    name: str
    case: Callable[[], Case]
    clean: Callable[[], Case]
    stage: str = ""
    torch: str = ""
    lines: Callable[..., Any] | None = None
    patch: Patch = nullcontext
    around: Patch = nullcontext
    settings: Mapping[str, Any] = field(default_factory=dict)

    def located_by(self, found: "Divergence | None") -> bool:
        """Whether a divergence is at the place of the bug."""
        if found is None or not re.fullmatch(self.stage, found.stage) or not re.match(self.torch, found.torch):
            return False
        if self.lines is None:
            return True
        function = self.lines.func if isinstance(self.lines, partial) else self.lines
        text, first = inspect.getsourcelines(function)
        file, line, *_ = found.jax_source.split(":")
        ours = function.__module__.replace(".", "/") + ".py"
        return file == ours and first <= int(line) < first + len(text)
