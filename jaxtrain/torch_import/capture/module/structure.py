"""A module without its weights, to be captured for any shapes and dtypes."""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain.data import tensor_to_numpy
from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.module.carried import Attribute, start
from jaxtrain.torch_import.capture.module.copying import Copy, Memory, copied, own_tensors
from jaxtrain.torch_import.capture.module.placing import Originals, originals_of
from jaxtrain.torch_import.graph import dtype_of
from jaxtrain.torch_import.ops.int64 import holds_int64, rounds
from jaxtrain.torch_import.refusals import first_line, refusal
from jaxtrain.torch_internals import FakeTensorMode, pytree


class Structure(NamedTuple):
    """A module without its weights, to be captured for any shapes and dtypes.

    Attributes:
      module: A copy whose parameters and buffers are fake tensors.
      mode: The mode they belong to.
      aliases: First name of each parameter, by each of its names: tied weights have several.
      buffers: First name of each buffer, by each of its names.
      originals: Parts and tensors of the module that was imported, which the copy must not read.
      shared: Buffers that share memory with another, by name.
      own: Returns the module itself, while it exists.
      carried: The attributes that forward carries from call to call.
    """

    module: torch.nn.Module
    mode: FakeTensorMode
    aliases: dict[str, str]
    buffers: dict[str, str]
    originals: Originals
    shared: dict[str, str]
    own: Callable[[], torch.nn.Module | None]
    carried: tuple[Attribute, ...] = ()


def structure_of(module: torch.nn.Module) -> Structure:
    """Return the structure of a module, which shares no memory with it.

    Raises:
      UserError: The module has hooks on its gradients, which a graph cannot contain, or cannot be copied.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise refusal(f"{type(module).__name__} is compiled by torch.jit", "import the module that it was made from")
    if is_lazy(module):
        raise refusal(f"{type(module).__name__} has lazy parameters", "call it once before the import")
    _refuse_hooks(module)
    shared = _shared_buffers(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        copy = _copy_of(module, mode)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{type(module).__name__} cannot be copied: {first_line(error)}") from error
    aliases = _first_names(module.named_parameters(remove_duplicate=False))
    buffers = _first_names(module.named_buffers(remove_duplicate=False))
    return Structure(copy.module, mode, aliases, buffers, originals_of(module), shared, weakref.ref(module))


def is_lazy(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters or buffers whose shapes the first call determines."""
    return any(map(torch.nn.parameter.is_lazy, (*module.parameters(), *module.buffers())))


def materialized(module: torch.nn.Module, example: Any, call: Callable[[torch.nn.Module, Any], Any]) -> torch.nn.Module:
    """Return a copy of a module whose lazy parameters have been made by a call in evaluation."""
    buffers = (x for x in module.buffers() if torch.nn.parameter.is_lazy(x))
    # PyTorch copies lazy parameters, but not lazy buffers.
    made = copy.deepcopy(module, {id(x): _lazy_buffer(x) for x in buffers})
    modes = {part: part.training for part in made.modules()}
    batch = pytree.tree_map_only((np.ndarray, jax.Array), lambda x: torch.tensor(np.asarray(x)), example)
    try:
        with torch.no_grad():
            call(made.eval(), batch)
    except Exception as error:
        raise refusal(
            f"{type(module).__name__} has lazy parameters and cannot be called: {first_line(error)}",
            "call it once before the import",
        ) from error
    for part in made.modules():
        part.training = modes.get(part, module.training)
    return made


def _lazy_buffer(like: torch.Tensor) -> torch.Tensor:
    return torch.nn.UninitializedBuffer(device=like.device, dtype=like.dtype)  # type: ignore[call-arg]


def _first_names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in named}


def _copy_of(module: torch.nn.Module, mode: FakeTensorMode, dtype: str | None = None) -> Copy:
    """Return a copy with fake parameters and buffers, the floating-point ones in a dtype as by `module.to(dtype)`."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        to = getattr(torch, dtype) if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=to, device="cpu")

    def computed(tensor: torch.Tensor) -> torch.Tensor:
        with mode, torch.enable_grad():
            return fake(tensor).requires_grad_().clone()

    with mode:
        tensors: dict[str, torch.Tensor] = {
            name: torch.nn.Parameter(fake(x), requires_grad=x.requires_grad) for name, x in module.named_parameters()
        }
        tensors |= {name: fake(x) for name, x in module.named_buffers()}
    return copied(module, tensors, computed)


def _shared_buffers(module: torch.nn.Module) -> dict[str, str]:
    """Return the buffers that share memory with another, by name, and refuse parameters that do."""
    tensors = own_tensors(module)
    for name, x in tensors.items():
        if x.layout != torch.strided:
            raise refusal(f"{name!r} is a sparse tensor", "store it as a dense one, x.to_dense()")
    shared: dict[str, str] = {}
    for name, other in Memory(tensors).shared():
        if isinstance(tensors[name], torch.nn.Parameter) or isinstance(tensors[other], torch.nn.Parameter):
            raise refusal(
                f"{name!r} and {other!r} are two tensors in the same memory",
                f"make them one, as by self.{other} = self.{name}",
            )
        shared |= {name: other, other: name}
    return shared


def _refuse_hooks(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise refusal(f"module {name or type(part).__name__!r} has a backward hook", "remove it before the import")
    for name, param in module.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise refusal(f"parameter {name!r} has a gradient hook", "remove it before the import")


def in_mode(structure: Structure, train: bool, dtype: str | None) -> Copy:
    """Return a copy of the module in training or evaluation mode, with its floating-point tensors in a dtype.

    A module that was given in training mode keeps the modes of its parts, such as a frozen BatchNorm in evaluation. If
    the dtype is that of all its parameters, other tensors keep their own too.
    """
    copy = _copy_of(structure.module, structure.mode, converted_to(structure, dtype))
    if not train:
        copy.module.eval()
    elif not copy.module.training:
        copy.module.train()
    return copy


def converted_to(structure: Structure, dtype: str | None) -> str | None:
    """Return the dtype that tensors are converted to; None if it is that of all parameters."""
    own = {dtype_name(x.dtype) for x in structure.module.parameters() if x.is_floating_point()}
    return None if own == {dtype} else dtype


def filled(structure: Structure, tensors: Mapping[str, Any]) -> torch.nn.Module:
    """Return a copy of the module with these parameters and buffers, by name, in the dtypes of the module."""

    def tensor(name: str, like: torch.Tensor) -> torch.Tensor:
        array = np.asarray(tensors[name])
        # NumPy has no bfloat16; float32 holds all its values.
        low = jnp.issubdtype(array.dtype, np.floating) and array.dtype.itemsize == 2
        given = torch.tensor(array.astype(np.float32) if low else array)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(given)

    def computed(like: torch.Tensor) -> torch.Tensor:
        # The first call computes it again; no value is kept until then.
        return torch.full(like.shape, torch.nan, dtype=like.dtype)

    new: dict[str, torch.Tensor] = {
        name: torch.nn.Parameter(tensor(name, x), requires_grad=x.requires_grad)
        for name, x in structure.module.named_parameters()
    }
    new |= {name: tensor(name, x) for name, x in structure.module.named_buffers()}
    module = copied(structure.module, new, computed).module
    values = {leaf.name: torch.tensor(np.asarray(tensors[leaf.name])) for x in structure.carried for leaf in x.leaves}
    start(module, structure.carried, values)
    return module


def persistent_buffers(structure: Structure) -> list[str]:
    """Return the names of the buffers that `state_dict()` contains."""
    saved = structure.module.state_dict()
    return [name for name, _ in structure.module.named_buffers() if name in saved]


def dtype_name(dtype: torch.dtype) -> str:
    """Return NumPy's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def captured_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of an input of a capture: integers have PyTorch's default."""
    found: torch.dtype = torch.int64 if dtype in ("int32", "int64", "uint32") else getattr(torch, dtype)
    return found


def as_array(x: Any) -> Any:
    """Return a tensor as an array of its own, or as its shape and dtype on the "meta" device; others as they are."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.device.type == "meta":
        return shape_of(x)
    array = tensor_to_numpy(x)
    # JAX would drop the upper bits.
    return array.copy() if holds_int64(array) else jnp.array(array)


def as_constant(x: torch.Tensor) -> Any:
    """Return a buffer as `as_array`; in NumPy's float64 where JAX would round it."""
    array = None if x.device.type == "meta" else tensor_to_numpy(x)
    return array.copy() if array is not None and rounds(array) else as_array(x)


def as_arrays(tensors: Mapping[str, torch.Tensor], stacks: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return tensors as arrays by name, those of a stack as one with a leading axis, in the place of the first."""
    stack_of = {name: stack for stack, names in stacks.items() for name in names}
    paths = dict.fromkeys(stack_of.get(name, name) for name in tensors)
    return {
        path: _stacked([tensors[x] for x in stacks[path]]) if path in stacks else as_array(tensors[path])
        for path in paths
    }


def _stacked(tensors: Sequence[torch.Tensor]) -> Any:
    one = shape_of(tensors[0])
    if any(x.device.type == "meta" for x in tensors):
        return jax.ShapeDtypeStruct((len(tensors), *one.shape), one.dtype)
    return jnp.asarray(np.stack([tensor_to_numpy(x) for x in tensors]))


def shape_of(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a tensor's array."""
    return jax.ShapeDtypeStruct(tuple(x.shape), dtype_of(dtype_name(x.dtype)))
