"""The cases and reports of docs/foreign.md."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from parity.run import examine
from tests.foreign import ports
from tests.foreign.edits import Edit
from tests.foreign.ports import PORTS

PAGE = Path(__file__).parent.parent.parent / "docs" / "foreign.md"
STEPS = 3
WIDTH = 118

CODE = re.compile(r'(?<=```python title=")(\w+)"\n.*?(?=```)', re.S)
REPORT = re.compile(r'(?<=```text title=")(\w+)"\n.*?(?=```)', re.S)

CORRECTIONS = {
    "dinov2": (
        Edit("self.config.layerscale_value * self.param(", "self.param("),
        Edit("self.lambda1 = self.lambda1 * self.config.layerscale_value", "pass"),
    ),
    "electra": (Edit("token_type_ids = jnp.ones_like(input_ids)", "token_type_ids = jnp.zeros_like(input_ids)"),),
    "mistral": (Edit("k=-(config.sliding_window or 0)", "k=1 - config.sliding_window"),),
}
"""What makes a port that differs hold."""


def report(name: str, *edits: Edit) -> str:
    """The lines that the check of a port prints."""
    with PORTS[name].edited(*edits) as case:
        found = examine(case, locate=True, steps=STEPS)
    lines = [f"{case.name} holds" if found.verdict.passed else f"{case.name} differs", *found.verdict.lines]
    return "\n".join(line[:WIDTH] for line in (*lines, *found.notes))


def code(name: str) -> str:
    """A function of `tests.foreign.ports`."""
    return inspect.getsource(getattr(ports, name))


def with_blocks(page: str, pattern: re.Pattern[str], text: Callable[[str], str]) -> str:
    """The page with new text in its blocks."""
    return pattern.sub(lambda block: f'{block[1]}"\n{text(block[1]).rstrip()}\n', page)


def blocks(page: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """The text of the blocks of a page."""
    return {block[1]: block[0].partition("\n")[2].rstrip() for block in pattern.finditer(page)}
