"""Read and write PyTorch's checkpoint files. Only this module imports torch, for files in torch's own format.

No code in a file is run: `.pt` is read by `torch.load(weights_only=True)`, which creates tensors, numbers, strings and
containers only, and `.safetensors` contains no code. Tensors are memory-mapped and read one by one.
"""

import argparse
import contextlib
import math
import pickletools
import reprlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.data import check_content, check_zip, is_zip
from jaxtrain.errors import UserError
from jaxtrain.folder_files import MOST_BYTES, new_file
from jaxtrain.interop.bitsandbytes import WRAPPED
from jaxtrain.records import Record, report_unread, unread_fields

# Names of training loops, of Lightning ("optimizer_states", "lr_schedulers", "MixedPrecision"), of DeepSpeed ("module",
# "global_steps") and of timm ("amp_scaler").
_MODEL = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_state", "optimizer_states")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "lr_schedulers")
_SCALER = ("scaler", "scaler_state_dict", "grad_scaler", "amp_scaler", "MixedPrecision", "native_amp_scaling_state")
_SCALER_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_STEP = ("step", "global_step", "global_steps")
_JOIN = (
    "join it first, a DeepSpeed one by its zero_to_fp32.py, one of FSDP by dcp_to_torch_save of"
    " torch.distributed.checkpoint.format_utils"
)
_MAX_LISTED = 20
_MAX_NUMBERS = 10**6
_MAX_UPDATES = 2**31  # counts are int32


Index = tuple[slice, ...]
"""Part of an array: a slice of every axis."""


class StoredTensor:
    """Tensor of a file with known shape and NumPy dtype, read by `numpy.asarray`, or a part of it by slices.

    Args:
      name: Name of the tensor.
      shape: Shape.
      dtype: Dtype.
      read: Function that reads the array.
      read_part: Function that reads a part of it; None reads all of it for a part.

    Raises:
      UserError: When it is read and contains inf or NaN.
    """

    def __init__(
        self,
        name: str,
        shape: Iterable[int],
        dtype: Any,
        read: Callable[[], np.ndarray],
        read_part: Callable[[Index], np.ndarray] | None = None,
    ) -> None:
        self.name, self.shape, self.dtype = name, tuple(shape), np.dtype(dtype)
        self._read, self._read_part = read, read_part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        array = self._finite(self._read())
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Index) -> np.ndarray:
        return self._finite(self._read()[index] if self._read_part is None else self._read_part(index))

    def _finite(self, array: np.ndarray) -> np.ndarray:
        if not (np.issubdtype(array.dtype, np.integer) or np.isfinite(array).all()):
            raise UserError(f"{self.name} contains inf or NaN: use an earlier checkpoint")
        return array


@dataclass(frozen=True)
class TorchCheckpoint:
    """Checkpoint of a PyTorch script, every part as its `state_dict()`; None for missing parts.

    Attributes:
      model: Tensors by name, in the order of the model.
      optimizer: "state", with tensors by parameter number and name, and "param_groups".
      scheduler: State of the scheduler.
      scaler: State of the GradScaler.
      step: Step that the script counted.
      epoch: Epoch that the script counted.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    step: int | None = None
    epoch: int | None = None


def read_torch(path: Path | str, known: Iterable[str] = ()) -> TorchCheckpoint:
    """Read a checkpoint from a `.safetensors` file or from a file of `torch.save`.

    A file of `torch.save` contains the model's `state_dict()`, or a dictionary with it under "model", "state_dict",
    "model_state_dict" or "module", and with those of the optimizer, the scheduler and the GradScaler, as scripts,
    Lightning, timm and DeepSpeed name them. Prefixes of DDP, of `torch.compile` and of the attribute that holds the
    model are removed. Other parts of the file are named in a warning.

    Args:
      path: File.
      known: Names of the model whose prefixes are not removed.

    Raises:
      UserError: The file is missing or is not a checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder, as of a sharded checkpoint: {_JOIN}")
    if not path.is_file():
        raise UserError(f"{path} is not a file: use a PyTorch checkpoint, .pt, .pth or .safetensors")
    if path.suffix == ".safetensors":
        return TorchCheckpoint(_unprefixed(_read_safetensors(path), known))
    saved = load(path)
    if not isinstance(saved, Mapping):
        raise UserError(f"{path} contains a {type(saved).__name__}: save a dictionary of state_dict()s")
    if "ds_version" in saved and not saved.get("optimizer"):
        raise UserError(f"{path} is a shard of a DeepSpeed checkpoint, whose optimizer is in other files: {_JOIN}")
    rest = Record(saved, nested=False)
    model = _part(rest, _MODEL, path)
    for part in (saved, model or {}):
        if not all(isinstance(name, str) for name in part):
            raise UserError(f"{path} contains {_listed(part)} where names must be: save state_dict()s")
    if model is None:
        if not saved or not all(_is_tensor(value) for value in saved.values()):
            raise UserError(
                f"{path} contains {_listed(saved)}, but no model: save its state_dict() under "
                f"{' or '.join(map(repr, _MODEL))}"
            )
        model, rest = saved, Record({})
    checkpoint = TorchCheckpoint(
        _unprefixed(_tensors(model), known),
        _stored_optimizer(_part(rest, _OPTIMIZER, path)),
        _numbers(_part(rest, _SCHEDULER, path), "the scheduler's part"),
        _numbers(_part(rest, _SCALER, path), "the scaler's part"),
        _count(rest, _STEP, path),
        _count(rest, ("epoch",), path),
    )
    scaler = [f"scaler.{name}" for name in checkpoint.scaler or () if name not in _SCALER_STATE]
    report_unread(path, [*unread_fields(rest), *scaler])
    return checkpoint


def write_torch(path: Path | str, checkpoint: TorchCheckpoint) -> None:
    """Write a checkpoint that `read_torch` and PyTorch's `load_state_dict` read, atomically."""
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
    """Write a dictionary with `torch.save`, arrays as tensors, atomically."""
    path = Path(path)
    torch = installed_torch(f"writes {path}")
    try:
        with new_file(path) as file:
            torch.save(_in_torch(dict(plain), torch, {}), file)
    except (OSError, RuntimeError) as error:
        why = next((cause.strerror for cause in _causes(error) if isinstance(cause, OSError)), None) or error
        raise UserError(f"{path} cannot be written ({why}): choose another --out") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those during which it was raised: torch reports a full disk as its own error."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def installed_torch(why: str) -> Any:
    """Return the module torch. Raises `UserError` with the reason it is needed if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"torch, which {why}, is not installed: pip install torch") from error
    return torch


def _in_torch(value: Any, torch: Any, made: dict[int, Any]) -> Any:
    """Return `value` with arrays as tensors; a repeated array, as of tied weights, becomes one tensor."""
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
        # The array is stored with its tensor, so that its id is not reused.
        made[id(value)] = value, tensor.view(torch.bfloat16) if low else tensor
    return made[id(value)][1]


def load(path: Path) -> Any:
    """Read tensors and plain values with `torch.load`, memory-mapped. Raises `UserError` for anything else."""
    import pickle

    torch = installed_torch(f"reads {path} but is not needed for .safetensors")
    check_content(path)
    if is_zip(path):
        # torch would map compressed tensors without decompressing them, and unpack a compressed pickle of any size.
        _check_not_script(path)
        check_zip(path, stored=True)
        _check_pickles(path)
    try:
        # timm saves its arguments, which are plain values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} contains more than tensors, numbers and dictionaries: save only state_dict()s"
        ) from error
    except Exception as error:  # unpickling raises many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not a file of the current torch.save ({reason}): save it again") from error
    _check_sizes(saved, path)
    return saved


def _check_sizes(saved: Any, path: Path) -> None:
    """Raise `UserError` for a tensor of more bytes than the file has: its elements are not in it."""
    waiting, seen, size = [saved], set[int](), path.stat().st_size
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif _is_tensor(value) and str(value.layout) == "torch.strided" and not value.is_meta:
            stored = value.untyped_storage().nbytes()
            if stored > size:
                raise UserError(f"{path} has {size:,} bytes, but a tensor of {stored:,}: save the model again")


def _check_not_script(path: Path) -> None:
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise UserError(
                f"{path} is a model of torch.jit.save: save torch.jit.load(path).state_dict() by torch.save"
            )


def _check_pickles(path: Path) -> None:
    """Raise `UserError` for a file in which a number says how much memory to allocate, by a call of `bytearray`."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl") and archive.getinfo(name).file_size > MOST_BYTES:
                    raise UserError(f"{path}: {name!r} has more than {MOST_BYTES:,} bytes: save only state_dict()s")
                if name.endswith(".pkl") and b"bytearray" in (content := archive.read(name)):
                    for opcode, value, _ in pickletools.genops(content):
                        if isinstance(value, str) and value.split()[-1:] == ["bytearray"] and opcode.name != "COMMENT":
                            raise UserError(
                                f"{path} contains more than tensors, numbers and dictionaries: save only state_dict()s"
                            )
    except (OSError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a file of the current torch.save ({error}): save it again") from error


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        import safetensors
    except ImportError as error:
        raise UserError(f"safetensors, which reads {path}, is not installed: pip install safetensors") from error
    check_content(path)
    try:
        file = safetensors.safe_open(path, "np")
        names = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file ({error}): download it again") from error

    def stored(name: str) -> StoredTensor:
        kind = names[name].get_dtype()
        if kind not in _SAFETENSORS:
            raise UserError(f"{name} in {path} has the unsupported dtype {kind}: convert it first")
        shape, dtype = names[name].get_shape(), _SAFETENSORS[kind]
        return StoredTensor(name, shape, dtype, lambda: file.get_tensor(name), names[name].__getitem__)

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
    """Return the dictionary under one of the names, or None."""
    found = {name: _single(saved.get(name), name, path) for name in names if not _is_tensor(saved.get(name))}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, Mapping):
            raise UserError(f"{name} in {path} is a {type(value).__name__}: save one state_dict() under that name")
    if len(found) > 1:
        raise UserError(f"{path} has both {' and '.join(found)}: keep one")
    return next(iter(found.values()), None)


def _single(value: Any, name: str, path: Path) -> Any:
    """Return the item of a list of Lightning, which has as many as the module has optimizers."""
    if name not in ("optimizer_states", "lr_schedulers") or not isinstance(value, list):
        return value
    if len(value) > 1:
        raise UserError(f"{name} in {path} are {len(value)}: only one optimizer with one schedule is supported")
    return value[0] if value else None


def _count(saved: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int | None:
    for name in names:
        value = saved.get(name)
        if value is not None:
            number = np.asarray(_stored(name, value)).item() if _is_tensor(value) and value.ndim == 0 else value
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < _MAX_UPDATES:
                raise UserError(f"{name} in {path} must be a count of at least 0, got {reprlib.repr(number)}")
            if number != int(number):
                raise UserError(f"{name} in {path} must be a whole number, got {number}")
            return int(number)
    return None


def _unprefixed(tensors: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Remove leading "module." of DDP, all "_orig_mod." of torch.compile, and the attribute that holds the model."""
    whole, bare = set(known), dict[str, Any]()
    for name, tensor in tensors.items():
        short = strip_prefixes(name, whole)
        if short in bare:
            raise UserError(f"{name} and another tensor are both {short} without their prefixes: remove one")
        bare[short] = tensor
    heads = {name.partition(".")[0] for name in bare}
    if len(heads) == 1 and not whole & bare.keys():
        inner = {name.partition(".")[2]: tensor for name, tensor in bare.items()}
        return inner if whole & inner.keys() else bare
    return bare


def strip_prefixes(name: str, known: set[str]) -> str:
    """Remove prefixes of DDP and torch.compile until the name is known.

    Example:
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
        raise UserError(f"the model contains other values than tensors, {', '.join(others)}: save its state_dict()")
    return {name: _stored(name, tensor) for name, tensor in model.items()}


def _stored_optimizer(optimizer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    if not (isinstance(optimizer.get("state"), Mapping) and isinstance(optimizer.get("param_groups"), list)):
        raise UserError("the optimizer's part has no state and param_groups: save optimizer.state_dict()")
    for entry in (*optimizer["state"].values(), *optimizer["param_groups"]):
        if not (isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)):
            raise UserError("the optimizer's part has entries without names: save optimizer.state_dict()")
    for group in optimizer["param_groups"]:
        for name, value in group.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name} of the optimizer is {value}: use an earlier checkpoint")
    report_unread("the optimizer of the checkpoint", optimizer.keys() - {"state", "param_groups"})
    state = {
        number: {
            key: _stored(f"{key} of parameter {number}", value) if _is_tensor(value) else value
            for key, value in _unwrapped(entries).items()
        }
        for number, entries in optimizer["state"].items()
    }
    return {"state": state, "param_groups": _numbers(optimizer["param_groups"], "a group of the optimizer")}


def _unwrapped(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a parameter with the entries that bitsandbytes hides from FSDP."""
    hidden = entries.get(WRAPPED, {})
    if not (isinstance(hidden, Mapping) and all(isinstance(key, str) for key in hidden)):
        raise UserError("the optimizer's part has entries without names: save optimizer.state_dict()")
    return {**{key: value for key, value in entries.items() if key != WRAPPED}, **hidden}


def _numbers(part: Any, where: str) -> Any:
    """Return `part`, validated: containers of numbers, strings and tensors of one element.

    Their number is bounded, because containers that contain one another are small in a file and endless to traverse.
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
            raise UserError(f"{where} contains a {type(value).__name__} where a number must be: save its state_dict()")
        if seen > _MAX_NUMBERS:
            raise UserError(f"{where} contains more than {_MAX_NUMBERS:,} numbers: save its state_dict()")
    return part


def _listed(names: Iterable[Any]) -> str:
    """Format names from an untrusted file: at most 20, and of other keys than strings only the type."""
    shown = [name if isinstance(name, str) else f"a {type(name).__name__}" for name in names]
    more = f" and {len(shown) - _MAX_LISTED} more" if shown[_MAX_LISTED:] else ""
    return (", ".join(shown[:_MAX_LISTED]) or "nothing") + more


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "layout")


def _stored(name: str, tensor: Any) -> StoredTensor:
    """Return a torch tensor as a `StoredTensor`."""
    kind = str(tensor.dtype).removeprefix("torch.")
    known = {np.dtype(t).name: t for t in _SAFETENSORS.values()} | {"bool": np.bool_}
    if kind not in known or str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_meta:
        what = f"{tensor.layout}, {tensor.dtype}" + (", without data" if tensor.is_meta else "")
        raise UserError(f"{name} is a tensor of {what}: only dense arrays of numbers are supported")

    def read() -> np.ndarray:
        plain = tensor.detach()
        if kind == "bfloat16":
            import torch

            low: np.ndarray = plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return low
        return plain.numpy()

    return StoredTensor(name, tensor.shape, known[kind], read)
