"""The contract of a port: a TOML file that names how both sides are built and stepped."""

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from jaxtrain.cli import nearest
from jaxtrain.errors import UserError, reason
from jaxtrain.user_file import import_file

SIGNATURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "source": {
        "model": (),
        "loss": ("model", "batch"),
        "optimizer": ("model",),
        "scheduler": ("optimizer",),
        "batch": ("seed",),
    },
    "target": {
        "init": ("weights",),
        "step": ("state", "batch"),
        "weights": ("state",),
        "gradients": ("state", "batch"),
    },
}
"""The arguments of each function that a contract names."""
NUMBERS = {"clip_norm": "a number above 0", "updates": "a whole number above 0"}
"""Keys of the source that are numbers."""
OPTIONAL = ("scheduler", "gradients", *NUMBERS)
"""Keys that a contract may leave out."""


@dataclass(frozen=True)
class Source:
    """The PyTorch file.

    Attributes:
      file: Its path.
      model: Returns the `torch.nn.Module`.
      loss: From (model, batch of tensors) to a scalar.
      optimizer: From the model to its `torch.optim.Optimizer`.
      batch: From a seed to arrays of NumPy by name, with the rows of the batch on the first axis.
      scheduler: From the optimizer to its scheduler, which steps after every update; None for none.
      clip_norm: Bound of the global gradient norm; None does not clip.
      updates: Number of updates of the run, of which no more are made; None if it has no length.
    """

    file: Path
    model: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., Any]
    batch: Callable[..., Any]
    scheduler: Callable[..., Any] | None
    clip_norm: float | None
    updates: int | None


@dataclass(frozen=True)
class Target:
    """The JAX file.

    Attributes:
      file: Its path.
      init: From PyTorch's tensors by name to the state of the training, a pytree of arrays.
      step: From (state, batch) to (the state after one update, the loss before it).
      weights: From the state to tensors by PyTorch's names, in PyTorch's layouts.
      gradients: From (state, batch) to the gradients that the optimizer receives, as `weights`; None if not named.
    """

    file: Path
    init: Callable[..., Any]
    step: Callable[..., Any]
    weights: Callable[..., Any]
    gradients: Callable[..., Any] | None


def read_contract(contract: Path, source: Path, target: Path) -> tuple[Source, Target]:
    """Read a contract and import both files; nothing of the contract is executed.

    Args:
      contract: The TOML file.
      source: The PyTorch file.
      target: The JAX file.

    Returns:
      Both sides.

    Raises:
      UserError: A file cannot be read, or it has no such name; a key is unknown, missing or has another type.
    """
    tables = _tables(contract)
    for path in (source, target):
        if not path.is_file():
            raise UserError(f"there is no file '{path}': name the PyTorch file, then the JAX file")
    theirs = _functions(import_file(source), source, "source", tables["source"])
    ours = _functions(import_file(target), target, "target", tables["target"])
    given: dict[str, Any] = {name: tables["source"].get(name) for name in NUMBERS}
    return Source(source, **theirs, **given), Target(target, **ours)


def _tables(contract: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a contract, with all that is required and nothing that is unknown."""
    try:
        read = tomllib.loads(contract.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"'{contract}' is not TOML: {error}: write each line as key = \"name\"") from error
    except (OSError, UnicodeError) as error:
        raise UserError(f"'{contract}' cannot be read ({reason(error)}): name a TOML file") from error
    for name in read.keys() - SIGNATURES.keys():
        raise UserError(
            f"'{contract}' has an unknown table [{name}]{nearest(name, [*SIGNATURES])}: use [source], [target]"
        )
    for name in SIGNATURES:
        if not isinstance(read.get(name), dict):
            raise UserError(f"'{contract}' has no table [{name}]: add it, with {', '.join(SIGNATURES[name])}")
        _check_keys(f"[{name}] of '{contract}'", name, read[name])
    return read


def _check_keys(where: str, table: str, entries: Mapping[str, Any]) -> None:
    known = [*SIGNATURES[table], *(NUMBERS if table == "source" else [])]
    for key, value in entries.items():
        if key not in known:
            raise UserError(f"{where} has an unknown key {key!r}{nearest(key, known)}: use {', '.join(known)}")
        if key in NUMBERS:
            kinds = (int,) if key == "updates" else (int, float)
            if type(value) not in kinds or not 0 < value < float("inf"):
                raise UserError(f"{key} in {where} must be {NUMBERS[key]}, got {value!r}")
        elif not isinstance(value, str) or not value.isidentifier():
            raise UserError(f"{key} in {where} must be the name of a function, got {value!r}")
    for key in known:
        if key not in entries and key not in OPTIONAL:
            given = ", ".join(SIGNATURES[table][key])
            raise UserError(f'{where} has no {key}: add {key} = "NAME", a function of ({given})')


def _functions(module: ModuleType, file: Path, table: str, names: Mapping[str, str]) -> dict[str, Any]:
    return {
        key: _function(module, file, key, names[key], arguments) if key in names else None
        for key, arguments in SIGNATURES[table].items()
    }


def _function(module: ModuleType, file: Path, key: str, name: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    if not hasattr(module, name):
        known = [other for other, value in vars(module).items() if callable(value)]
        raise UserError(f"{file} has no {name!r}, the contract's {key}{nearest(name, known)}: correct the contract")
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{name} in {file} is {type(found).__name__}, the contract's {key}: name a function")
    try:
        inspect.signature(found).bind(*arguments)
    except ValueError:  # a builtin, which has no signature
        return cast(Callable[..., Any], found)
    except TypeError as error:
        raise UserError(
            f"{name} in {file} cannot be called as {name}({', '.join(arguments)}), {error}: name a function of these "
            f"arguments as {key}"
        ) from error
    return cast(Callable[..., Any], found)
