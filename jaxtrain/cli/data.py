"""`jaxtrain data NAME`: write examples to fine-tune on that every machine has."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxtrain.cli import nearest
from jaxtrain.cli.flags import parse
from jaxtrain.data.finetuning import write_stdlib_pairs
from jaxtrain.errors import UserError

_NAMES = ("stdlib-pairs",)


@dataclass(frozen=True)
class Data:
    """Write questions about Python's standard library with their answers, its docstrings, as conversations.

    The held-out pairs are of the modules that the recipes on its source, such as gpt-stdlib, hold out too."""

    out: Path = Path("stdlib-pairs")
    """Folder to create, with train.jsonl and validation.jsonl."""


def main(args: list[str]) -> int:
    """Parse, write, print the counts and the next command."""
    usage = "jaxtrain data stdlib-pairs [--out DIR]"
    if any(a in ("-h", "--help") for a in args):
        args = [_NAMES[0], "--help"]
    if not args or args[0].startswith("-"):
        raise UserError(f"a name is required: {usage}")
    if args[0] not in _NAMES:
        raise UserError(f"no data {args[0]!r}{nearest(args[0], _NAMES)}: {usage}")
    options = parse(Data(), args[1:], "jaxtrain data stdlib-pairs")
    with Console(stderr=True).status("reading Python's standard library"):
        pairs = write_stdlib_pairs(options.out)
    print(*pairs.lines(), sep="\n")
    print(f"wrote {options.out}: jaxtrain train finetune --model FOLDER --data {options.out}")
    return 0
