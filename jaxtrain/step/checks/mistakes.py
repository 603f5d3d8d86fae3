"""Mistakes in the use of `train_step` and `eval_step`, each described in one line with its remedy.

What can be seen when the step is built or traced is checked there. The other checks run after a call has failed, so
that calls which succeed cost nothing.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError, format_location, user_location
from jaxtrain.paths import path_name
from jaxtrain.step.checks.batch import differing_rows

MAX_DESCRIBED_LEAVES = 12


def describe(tree: Any) -> str:
    """Format a pytree with the dtypes and shapes of its arrays.

    >>> describe({"x": np.ones((2, 3), np.float32), "name": "a"})
    '{name: str "a", x: float32[2,3]}'
    """
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) > MAX_DESCRIBED_LEAVES:
        names = f" with the keys {', '.join(map(str, tree))}" if isinstance(tree, dict) else ""
        return f"a {type(tree).__name__} of {len(leaves)} leaves{names}"
    return str(jax.tree.unflatten(structure, [_Text(describe_leaf(leaf)) for leaf in leaves])).replace("'", "")


def describe_leaf(leaf: Any) -> str:
    """Format the dtype and shape of an array, or the type of anything else."""
    if is_number(leaf):
        return f"{jax.numpy.result_type(leaf)}{list(np.shape(leaf))}".replace(" ", "")
    return f'{type(leaf).__name__} "{leaf}"' if isinstance(leaf, str) else _kind(leaf)


def is_number(x: Any) -> bool:
    """Return whether `x` is an array that JAX accepts, a shape of one, or a Python number."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | bool | int | float | complex):
        return True
    # ml_dtypes' bfloat16 and float8 are of kind "V"; timedelta64, of kind "m", is a number for NumPy alone.
    return isinstance(x, np.ndarray | np.generic) and (
        x.dtype.kind in "biufc" or (x.dtype.kind == "V" and jax.dtypes.issubdtype(x.dtype, np.number))
    )


def is_concrete(x: Any) -> bool:
    """Return whether `x` is a JAX array that is not traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def is_deleted(x: Any) -> bool:
    """Return whether `x` is an array that was donated."""
    return is_concrete(x) and bool(x.is_deleted())


def check_loss_fn(loss_fn: Any) -> None:
    """Raise `UserError` for a loss_fn that no step could call."""
    if not callable(loss_fn):
        raise UserError(
            f"loss_fn must be a function (params, batch, rng) -> (Loss, metrics), got {_value(loss_fn)}: "
            "define one, with the model's call inside"
        )
    if not any(accepts(loss_fn, n) for n in (3, 4)):
        raise UserError(
            "loss_fn must take (params, batch, rng), or (params, batch, rng, model_state), "
            f"got {signature_of(loss_fn)}: change its parameters"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise `UserError` unless `optimizer` is an optax transformation."""
    if is_transformation(optimizer):
        return
    kind = _value(optimizer)
    remedy = "use one of jaxtrain.optim or optax, such as jaxtrain.optim.adamw(1e-3)"
    is_class = inspect.isclass(optimizer)
    if _package(optimizer) == "torch":
        remedy = "convert it with jaxtrain.interop.from_torch, or " + remedy
    elif is_class and optimizer.__module__.partition(".")[0] == "torch":
        kind = f"the class torch.optim.{optimizer.__name__}"
    elif is_class:
        kind = f"the class {optimizer.__name__}"
    elif _is_schedule(optimizer):
        kind, remedy = "a schedule", "give it to an optimizer, as in jaxtrain.optim.adamw(schedule)"
    elif callable(optimizer):
        kind, remedy = "function", f"call it, as in {getattr(optimizer, '__name__', 'optimizer')}(1e-3)"
    elif isinstance(optimizer, int | float):
        remedy = f"a learning rate alone is no optimizer, use jaxtrain.optim.adamw({optimizer})"
    elif isinstance(optimizer, tuple | list) and all(map(is_transformation, optimizer)):
        remedy = "join them with optax.chain(...)"
    raise UserError(f"optimizer must be an optax.GradientTransformation, got {kind}: {remedy}")


def _is_schedule(x: Any) -> bool:
    """Return whether a function returns a number for a count, as a learning rate schedule does."""
    try:
        return bool(is_number(rate := x(0)) and np.ndim(rate) == 0)
    except Exception:  # whatever a function of other arguments raises
        return False


def is_transformation(x: Any) -> bool:
    """Return whether `x` has the interface of `optax.GradientTransformation`."""
    return not inspect.isclass(x) and callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def check_container(params: Any) -> None:
    """Raise `UserError` for a module of a library, or a state, in place of parameters."""
    if type(params).__name__ == "TrainState" and hasattr(params, "params"):
        raise UserError("params must be a pytree of arrays, got a TrainState: pass state.params")
    for kind in type(params).__mro__:
        if remedy := _MODULES.get(f"{kind.__module__}.{kind.__qualname__}"):
            raise UserError(f"params must be a pytree of arrays, got the module {type(params).__name__}: {remedy}")


def check_params(params: Any) -> None:
    """Raise `UserError` for parameters that are not numbers, or that no longer exist."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path) or "params"
        if is_deleted(leaf):
            raise UserError(
                f"parameter {name} was donated to an earlier call and no longer exists: "
                "use the state which that call returned, or copy the params before the call"
            )
        if _package(leaf) == "torch":
            raise UserError(
                f"parameter {name} is a {_type_name(leaf)}: convert it with numpy.asarray(tensor), and transpose the "
                "weights of linear layers, or use jaxtrain.interop.read_torch and a NameTable"
            )
        if not is_number(leaf):
            raise UserError(
                f"parameter {name} is {describe_leaf(leaf)}, not an array of numbers: leave it out of params, "
                "for example by closing over it in loss_fn"
            )


_MODULES = {
    "flax.nnx.module.Module": "split it, as in apply, params = jaxtrain.models.functional(model)",
    "flax.linen.module.Module": "create its parameters, as in model.init(key, x)",
    "torch.nn.modules.module.Module": "import it, as model = jaxtrain.from_torch(module, batch), and use model.params",
}


def called(factory: Callable[[], Any]) -> Any:
    """Return what a function given in place of a pytree creates."""
    if not accepts(factory, 0):
        raise UserError(
            f"params and model_state may be functions without arguments, got {signature_of(factory)}: "
            "give it its arguments, as in lambda: create(key)"
        )
    return factory()


def loss_fn_error(error: Exception, loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Return what is wrong with a loss_fn that raised, or None if its own message must do."""
    _, batch, rng, *model_state = args
    if isinstance(error, TypeError | ValueError) and "shapes" in str(error) and (rows := differing_rows(batch)):
        where = user_location(error) or "loss_fn"
        return f"{where}: {rows}: give them the same rows, or compute with both in loss_fn"
    if isinstance(error, TypeError) and _is_raised_by_the_call(error) and not accepts(loss_fn, len(args)):
        signature = signature_of(loss_fn)
        if model_state:
            return (
                f"loss_fn must take (params, batch, rng, model_state), got {signature}: "
                "the state has a model_state, which it takes and returns"
            )
        return (
            f"loss_fn must take (params, batch, rng), got {signature}: "
            "a fourth parameter requires step.init(params, model_state=...)"
        )
    if isinstance(error, TypeError) and str(error).startswith("Loss.__new__() missing"):
        where = user_location(error) or "loss_fn"
        return (
            f"{where}: Loss(total) needs its weight too: use Loss.of(losses) with the losses before their sum, "
            "or Loss(total, weight)"
        )
    if rng is None and re.search(r"PRNG ?key|`rngs?`|rng key", str(error), re.IGNORECASE):
        where = user_location(error) or "loss_fn"
        return (
            f"{where}: eval_step calls loss_fn with rng=None: "
            "apply dropout only if rng is not None, as in deterministic=rng is None"
        )
    return tracing_error(error)


def tracing_error(error: BaseException) -> str | None:
    """Return in one line JAX's errors about the value of a traced array, with the user's line; None for others."""
    where, text = user_location(error), str(error)
    if created := re.search(r"created on line (\S+):(\d+):\d+", text):
        where = format_location(created[1], int(created[2]))
    if where is None:
        return None
    found = re.search(r"(?:array with shape|type|got) ([a-z]+[0-9]*\[[0-9,]*\])", text)
    value = f"a traced value, {found[1]}" if found else "a traced value"
    match error:
        case jax.errors.TracerBoolConversionError():
            return (
                f"{where}: if, and, or, not, while or assert on {value}: "
                "use jnp.where, jax.lax.cond or jax.lax.while_loop"
            )
        case jax.errors.NonConcreteBooleanIndexError():
            return (
                f"{where}: x[mask] with {value} as the mask: "
                "multiply by the mask, use jnp.where, or jt.Loss.of(losses, mask)"
            )
        case jax.errors.TracerIntegerConversionError():
            return (
                f"{where}: {value}, as a Python integer: use jnp.take to index and jax.lax.fori_loop instead of range"
            )
        case jax.errors.TracerArrayConversionError():
            return f"{where}: a NumPy function of {value}: replace np by jnp"
        case jax.errors.ConcretizationTypeError():
            name = re.search(r"`(\w+)` function|the (\w+)\(\) method", text)
            call = f"{name[1] or name[2]}()" if name else "a Python number"
            return f"{where}: {call} of {value}: leave it an array, and return it as a metric to read it"
        case jax.errors.UnexpectedTracerError():
            return (
                f"{where}: {value}, was stored on an object, in a list or in a global, and used after its trace: "
                "return it as a metric or as model_state"
            )
        case TypeError() if "Tracer.__format__" in text:
            return f"{where}: an f-string formats {value}: use jax.debug.print, or return it as a metric"
    return None


def call_note(params: Any, batch: Any) -> str:
    """Return a note on the arguments of a loss_fn that raised."""
    return f"loss_fn was called with params {describe(params)} and batch {describe(batch)}"


def batch_error(batch: Any) -> str | None:
    """Return what is wrong with a batch, or None."""
    if batch is None:
        return "the batch is None: pass a pytree of arrays, as in {'x': x, 'y': y}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_list_of_numbers):
        name = path_name(path) or "batch"
        if _package(leaf) == "torch":
            if hasattr(leaf, "numpy"):
                return f"the batch must hold NumPy or JAX arrays, got a torch.Tensor at {name}: pass tensor.numpy()"
            return f"the batch is a torch {type(leaf).__name__}: pass one of its batches, as NumPy arrays"
        if isinstance(leaf, list):
            return f"the batch holds a list of numbers at {name}: pass numpy.asarray(...) of it"
        if isinstance(leaf, np.ma.MaskedArray):
            return f"the array {name} of the batch is masked: pass x.filled(0), and the mask as an array of its own"
        if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.isnative:
            native = leaf.dtype.newbyteorder("=").name
            return f"the array {name} of the batch has another byte order: pass x.astype('{native}')"
        if is_deleted(leaf):
            return f"the array {name} of the batch was donated and no longer exists: pass a copy"
        if isinstance(leaf, Iterator):
            return f"the batch is an iterator, {_type_name(leaf)}: pass one batch, as in next(batches)"
        if isinstance(leaf, str | bytes) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "US"):
            example = leaf if isinstance(leaf, str | bytes) else leaf.flat[0] if leaf.size else ""
            return f"the batch holds strings at {name}, {str(example)!r}: leave them out, or encode them as integers"
        if not is_number(leaf) and not jax.dtypes.issubdtype(getattr(leaf, "dtype", object), jax.dtypes.prng_key):
            kind = _article(_kind(leaf))
            return f"the batch must hold arrays of numbers, got {kind} at {name}: leave it out or convert it"
    return None


def device_error(state: Any, batch: Any) -> str | None:
    """Return a disagreement of the devices on which a state and a batch are placed, or None."""
    of_state, of_batch = (
        {
            ", ".join(sorted(map(str, leaf.sharding.device_set)))
            for leaf in jax.tree.leaves(tree)
            if is_concrete(leaf) and leaf.committed
        }
        for tree in (state, batch)
    )
    if len(of_state) != 1 or len(of_batch) != 1 or of_state == of_batch:
        return None
    placed = f"the state is on {of_state.pop()}, the batch on {of_batch.pop()}"
    return f"{placed}: place both alike, with jax.device_put(batch, device)"


def alias_error(state: Any, batch: Any) -> str | None:
    """Return two arrays in the same memory, of which a call donates one and uses the other, or None."""
    donated: dict[Any, str] = {}
    for tree, of in ((state, "the state"), (batch, "the batch")):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = f"{path_name(path) or 'the array'} of {of}"
            for place in _places(leaf):
                if place in donated:
                    return (
                        f"{donated[place]} and {name} are one array, which a step cannot donate and use as well: "
                        "replace one by jax.numpy.copy of it"
                    )
                if tree is state:
                    donated[place] = name
    return None


def _places(leaf: Any) -> list[Any]:
    """Return the device and the address of each part of an array; none for keys, which have no address."""
    if not is_concrete(leaf) or not leaf.size or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return []
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def difference(tree: Any, expected: Any) -> str | None:
    """Return the first difference in structure, shape or dtype of two pytrees, or None.

    >>> difference({"w": np.ones(2)}, {"w": np.ones(3), "b": np.ones(3)})
    'lacks b'
    """
    ours, theirs = ({path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(t)} for t in (tree, expected))
    for name in theirs:
        if name not in ours:
            return f"lacks {name}"
    for name, leaf in ours.items():
        if name not in theirs:
            return f"has {name}, which the step does not use"
        if (np.shape(leaf), _dtype(leaf)) != (np.shape(theirs[name]), _dtype(theirs[name])):
            return f"has {describe_leaf(leaf)} at {name}, expected {describe_leaf(theirs[name])}"
    if not same_structure(tree, expected):
        return "is of another type"
    return None


def _dtype(leaf: Any) -> Any:
    """Return the dtype of an array, also of one of keys, or that of a Python number in JAX."""
    return leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)


def same_structure(tree: Any, other: Any) -> bool:
    """Return whether two pytrees have the same structure, whatever their leaves."""
    structure: Any = jax.tree.structure(tree)
    return bool(structure == jax.tree.structure(other))


def location_of(fn: Any) -> str | None:
    """Return where a function is defined, as "loss.py:12"."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return code and format_location(code.co_filename, code.co_firstlineno)


class _Text(str):
    """A string printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def accepts(fn: Callable[..., Any], n: int) -> bool:
    """Return whether `fn` can be called with n positional arguments; True if its signature is unknown."""
    try:
        inspect.signature(fn).bind(*range(n))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def signature_of(fn: Any) -> str:
    """Format a function's name and parameters."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return f"{name}{inspect.signature(fn)}"


def _is_raised_by_the_call(error: BaseException) -> bool:
    """Return whether calling a function failed, rather than the function."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _is_list_of_numbers(x: Any) -> bool:
    while isinstance(x, list) and x:
        x = x[0]
        if isinstance(x, bool | int | float):
            return True
    return False


def _package(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _type_name(x: Any) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _kind(x: Any) -> str:
    return f"{x.dtype} array" if isinstance(x, np.ndarray) else _type_name(x)


def _value(x: Any) -> str:
    """Format the type of a value, and the value if it is short."""
    text = repr(x)
    return f"{type(x).__name__} {text}" if isinstance(x, str | int | float) and len(text) <= 40 else type(x).__name__


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
