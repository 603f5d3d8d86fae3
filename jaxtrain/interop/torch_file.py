"""PyTorch's checkpoint files, in and out. Torch is imported here only, and only to read or write one of its own.

Nothing of a file is run: `.pt` is unpickled by `torch.load(weights_only=True)`, which makes tensors, numbers, strings
and containers and nothing else, and `.safetensors` holds no code. Tensors are mapped into memory, and read one by one.
"""

import contextlib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.data import check_zip, is_zip
from jaxtrain.errors import UserError

_MODEL = ("model", "state_dict", "model_state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_SCALER = ("scaler", "scaler_state_dict")
_STEP = ("step", "global_step")
_LISTED = 20
_MOST_NUMBERS = 10**6
_MOST_UPDATES = 2**31  # they are counted in int32


class StoredTensor:
    """A tensor of a file: its `shape` and NumPy `dtype` are known, `numpy.asarray` reads it.

    Raises `UserError`, naming it, where it is read and holds an inf or a NaN.
    """

    def __init__(self, name: str, shape: Iterable[int], dtype: Any, read: Callable[[], np.ndarray]) -> None:
        self.name, self.shape, self.dtype = name, tuple(shape), np.dtype(dtype)
        self._read = read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        array = self._read()
        if not (np.issubdtype(array.dtype, np.integer) or np.isfinite(array).all()):
            raise UserError(f"{self.name} holds inf or NaN: that run is past saving, take an earlier checkpoint")
        return array if dtype is None else array.astype(dtype)


@dataclass(frozen=True)
class TorchCheckpoint:
    """What a PyTorch script saves of a run, each part as its `state_dict()` has it; None for what is not there.

    `model`: tensors by name, in the order of the model. `optimizer`: its "state", tensors by number and name, and its
    "param_groups". `step` is whatever the script counted.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    step: int | None = None
    epoch: int | None = None


def read_torch(path: Path | str, known: Iterable[str] = ()) -> TorchCheckpoint:
    """The checkpoint in a `.safetensors` file, or in any other as `torch.save` writes it.

    That is the model's `state_dict()`, or a dictionary with it under "model", "state_dict" or "model_state_dict", and
    so the optimizer's, the scheduler's and the GradScaler's. Prefixes of DDP and of `torch.compile` are taken off,
    unless the name is `known` with them. Raises `UserError` for a file that is no such thing.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is no file: give a PyTorch checkpoint, .pt, .pth or .safetensors")
    if path.suffix == ".safetensors":
        return TorchCheckpoint(_unprefixed(_read_safetensors(path), known))
    saved = load(path)
    if not isinstance(saved, Mapping):
        raise UserError(f"{path} holds a {type(saved).__name__}: save a dictionary of state_dict()s")
    model, rest = _part(saved, _MODEL, path), saved
    for part in (saved, model or {}):
        if not all(isinstance(name, str) for name in part):
            raise UserError(f"{path} holds {_listed(part)} where names are to be: save state_dict()s")
    if model is None:
        if not saved or not all(_is_tensor(value) for value in saved.values()):
            raise UserError(
                f"{path} holds {_listed(saved)}, and no model: save its state_dict() under "
                f"{' or '.join(map(repr, _MODEL))}"
            )
        model, rest = saved, {}
    return TorchCheckpoint(
        _unprefixed(_tensors(model), known),
        _stored_optimizer(_part(rest, _OPTIMIZER, path)),
        _numbers(_part(rest, _SCHEDULER, path), "the scheduler's part"),
        _numbers(_part(rest, _SCALER, path), "the scaler's part"),
        _count(rest, _STEP, path),
        _count(rest, ("epoch",), path),
    )


def write_torch(path: Path | str, checkpoint: TorchCheckpoint) -> None:
    """Write the dictionary that `read_torch` reads and PyTorch's `load_state_dict`s take. Whole or not at all."""
    parts = {
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
        "scheduler": checkpoint.scheduler,
        "scaler": checkpoint.scaler,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
    }
    save(path, {name: part for name, part in parts.items() if part is not None})


def save(path: Path | str, plain: Mapping[str, Any]) -> None:
    """`torch.save` of a dictionary whose arrays become tensors. Whole or not at all."""
    path = Path(path)
    torch, partial = installed_torch(f"{path} is written by it"), path.with_name(f"{path.name}.partial")
    try:
        torch.save(_in_torch(dict(plain), torch, {}), partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error}): choose another --out") from error


def installed_torch(why: str) -> Any:
    """The module. Raises `UserError`, saying `why` it is wanted, where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"torch is not installed, and {why}: pip install torch") from error
    return torch


def _in_torch(value: Any, torch: Any, made: dict[int, Any]) -> Any:
    """`value` with its arrays as tensors; an array that is there twice, as tied weights are, becomes one tensor."""
    if isinstance(value, Mapping):
        return {key: _in_torch(entry, torch, made) for key, entry in value.items()} if type(value) is dict else value
    if isinstance(value, StoredTensor):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    if id(value) not in made:
        array = np.array(value, order="C")
        low = array.dtype == ml_dtypes.bfloat16
        tensor = torch.from_numpy(array.view(np.int16) if low else array)
        # The array itself is kept beside its tensor, so that no other is given its id.
        made[id(value)] = value, tensor.view(torch.bfloat16) if low else tensor
    return made[id(value)][1]


def load(path: Path) -> Any:
    """`torch.load`, of tensors and plain values only, into mapped memory. Raises `UserError` for anything else."""
    import pickle

    torch = installed_torch(f"{path} is read by it; a .safetensors file is read without")
    if is_zip(path):
        # Its tensors are mapped, so that compressed ones would be read as they lie; its pickle would be unpacked.
        check_zip(path, stored=True)
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} holds more than tensors, numbers and dictionaries: save state_dict()s only") from error
    except Exception as error:  # whatever an unpickler may stumble over
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is no checkpoint as torch.save writes it now ({said}): save it anew") from error


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        import safetensors
    except ImportError as error:
        raise UserError(f"safetensors is not installed, and {path} is read by it: pip install safetensors") from error
    try:
        file = safetensors.safe_open(path, "np")
        names = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is no safetensors file ({error}): take it from its source again") from error

    def stored(name: str) -> StoredTensor:
        kind = names[name].get_dtype()
        if kind not in _SAFETENSORS:
            raise UserError(f"{name} in {path} is of {kind}, which no parameter is: convert it first")
        return StoredTensor(name, names[name].get_shape(), _SAFETENSORS[kind], lambda: file.get_tensor(name))

    return {name: stored(name) for name in names}


_SAFETENSORS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def _part(saved: Mapping[str, Any], names: tuple[str, ...], path: Path) -> Any:
    """The dictionary under one of the names; None where there is none."""
    found = {name: saved[name] for name in names if saved.get(name) is not None and not _is_tensor(saved[name])}
    for name, value in found.items():
        if not isinstance(value, Mapping):
            raise UserError(f"{name} in {path} is a {type(value).__name__}: save one state_dict() under that name")
    if len(found) > 1:
        raise UserError(f"{path} has {' and '.join(found)}, of which one is to be read: keep one")
    return next(iter(found.values()), None)


def _count(saved: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int | None:
    for name in names:
        value = saved.get(name)
        if value is not None:
            number = np.asarray(_stored(name, value)).item() if _is_tensor(value) and value.ndim == 0 else value
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < _MOST_UPDATES:
                raise UserError(f"{name} in {path} is {reprlib.repr(number)}, no count: save a number of 0 or more")
            if number != int(number):
                raise UserError(f"{name} in {path} is {number}, no count: save a whole number")
            return int(number)
    return None


def _unprefixed(tensors: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Without "module." in front, as DDP and others write it, and without torch.compile's "_orig_mod." anywhere."""
    whole, bare = set(known), dict[str, Any]()
    for name, tensor in tensors.items():
        short = strip_prefixes(name, whole)
        if short in bare:
            raise UserError(f"{name} and another tensor are both {short} without their prefixes: keep one")
        bare[short] = tensor
    return bare


def strip_prefixes(name: str, known: set[str]) -> str:
    """
    >>> strip_prefixes("module._orig_mod.module.h.0._orig_mod.weight", set())
    'h.0.weight'
    """
    parts = name.split(".")
    while ".".join(parts) not in known and "_orig_mod" in parts:
        parts.remove("_orig_mod")
    while parts[0] == "module" and len(parts) > 1 and ".".join(parts) not in known:
        parts = parts[1:]
    return ".".join(parts)


def _tensors(model: Mapping[str, Any]) -> dict[str, StoredTensor]:
    others = [f"{name} ({type(value).__name__})" for name, value in model.items() if not _is_tensor(value)]
    if others:
        raise UserError(f"the model holds what is no tensor: {', '.join(others)}: save its state_dict()")
    return {name: _stored(name, tensor) for name, tensor in model.items()}


def _stored_optimizer(optimizer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    if not (isinstance(optimizer.get("state"), Mapping) and isinstance(optimizer.get("param_groups"), list)):
        raise UserError("the optimizer's part has no state and param_groups: save optimizer.state_dict()")
    for entry in (*optimizer["state"].values(), *optimizer["param_groups"]):
        if not (isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)):
            raise UserError("the optimizer's part has entries without names: save optimizer.state_dict()")
    state = {
        number: {
            key: _stored(f"{key} of parameter {number}", value) if _is_tensor(value) else value
            for key, value in entries.items()
        }
        for number, entries in optimizer["state"].items()
    }
    return {"state": state, "param_groups": _numbers(optimizer["param_groups"], "a group of the optimizer")}


def _numbers(part: Any, where: str) -> Any:
    """`part`, containers of numbers, text and tensors of one number. Raises `UserError` for others, and for too many:
    containers that hold one another in turn are small in a file and endless to walk.
    """
    waiting, seen = [part], 0
    while waiting:
        value, seen = waiting.pop(), seen + 1
        if isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif _is_tensor(value) and value.numel() == 1:
            _stored(f"a number in {where}", value)
        elif not isinstance(value, bool | int | float | str | None):
            raise UserError(f"{where} holds a {type(value).__name__} where a number is to be: save its state_dict()")
        if seen > _MOST_NUMBERS:
            raise UserError(f"{where} holds more than {_MOST_NUMBERS:,} numbers: save its state_dict()")
    return part


def _listed(names: Iterable[Any]) -> str:
    """Names, of which a file may have any number and, in a pickle, of any kind: to show one could take for ever."""
    said = [name if isinstance(name, str) else f"a {type(name).__name__}" for name in names]
    return (", ".join(said[:_LISTED]) or "nothing") + (f" and {len(said) - _LISTED} more" if said[_LISTED:] else "")


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "layout")


def _stored(name: str, tensor: Any) -> StoredTensor:
    """A torch tensor, read when asked for."""
    kind = str(tensor.dtype).removeprefix("torch.")
    known = {np.dtype(t).name: t for t in _SAFETENSORS.values()} | {"bool": np.bool_}
    if kind not in known or str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_meta:
        what = f"{tensor.layout}, {tensor.dtype}" + (", without data" if tensor.is_meta else "")
        raise UserError(f"{name} is a tensor of {what}: only plain arrays of numbers are read")

    def read() -> np.ndarray:
        plain = tensor.detach()
        if kind == "bfloat16":
            import torch

            low: np.ndarray = plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return low
        return plain.numpy()

    return StoredTensor(name, tensor.shape, known[kind], read)
