"""`jaxtrain from-torch FILE.py::FACTORY --out model.py`: write a PyTorch module as readable JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.flags import parse
from jaxtrain.torch_import import from_torch
from jaxtrain.user_file import import_file

COMMAND = "jaxtrain from-torch FILE.py::FACTORY --out model.py"


@dataclass(frozen=True)
class FromTorch:
    """Write a PyTorch module as readable JAX, with its weights beside it."""

    out: Path = Path("model.py")
    """File of the source. The weights are written to params.safetensors in its folder, and buffers that the source
    reads to buffers.safetensors."""


def main(args: list[str]) -> int:
    """Parse, import, write, print."""
    asks_help = any(arg in ("-h", "--help") for arg in args)
    if not asks_help and (not args or args[0].startswith("-")):
        raise UserError(f"a function that returns (module, example_batch) is required: {COMMAND}")
    named, flags = ("FILE.py::FACTORY", args) if asks_help else (args[0], args[1:])
    options = parse(FromTorch(), flags, f"jaxtrain from-torch {named}")
    model = from_torch(*_made(named))
    written = model.save_source(options.out)
    print(f"wrote {', '.join(map(str, written))}")
    return 0


def _made(named: str) -> tuple[Any, Any]:
    """Return the module and the example batch of a user's function."""
    file, found, name = named.partition("::")
    path = Path(file)
    if not found or not path.is_file():
        raise UserError(f"{named!r} is not FILE.py::FACTORY: {COMMAND}")
    factory = getattr(import_file(path), name, None)
    if not callable(factory):
        raise UserError(f"{path} has no function {name!r}: define one that returns (module, example_batch)")
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise UserError(f"{named} returned a {type(made).__name__}: return (module, example_batch)")
    return made
