"""`jaxtrain port SCRIPT`: a PyTorch training script, unmodified, as a recipe that is proved to be the same run."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxtrain.errors import UserError
from jaxtrain.fields import Count
from jaxtrain.flags import parse

COMMAND = "jaxtrain port [--updates N] [--out DIR] SCRIPT [the script's own arguments]"


@dataclass(frozen=True)
class Port:
    """Record a PyTorch training script, write it as a recipe, and prove that both are the same run.

    The script runs as by `python SCRIPT` for a few updates, then it is stopped. All that follows its name is its own.
    """

    updates: Count = 20
    """Number of updates that are recorded and proved."""
    out: Path = Path("port")
    """Folder of the files; it must be empty or new."""


def main(args: list[str]) -> int:
    """Record, understand, write, prove; print what was found."""
    flags, script, own = _split(args)
    options = parse(Port(), flags, COMMAND.removesuffix(" SCRIPT [the script's own arguments]"))
    if script is None:
        raise UserError(f"a script is required: {COMMAND}")
    path = Path(script)
    if not path.is_file():
        raise UserError(f"{script} does not exist: {COMMAND}")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(f"{options.out} exists and is not empty: choose another folder with --out")
    return _port(options, path, own)


def _split(args: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Split arguments into the command's flags, the script, and the script's own arguments."""
    i = 0
    while i < len(args) and args[i].startswith("-"):
        i += 1 if "=" in args[i] or args[i] in ("-h", "--help") else 2
    return args[:i], args[i] if i < len(args) else None, args[i + 1 :]
