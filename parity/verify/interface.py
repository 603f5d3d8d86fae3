"""The first stage: a port takes the source's tensors, returns them, and makes a step without side effects."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.paths import path_name
from parity.progress import report
from parity.record import Tensors
from parity.sides.jax_side import exactly
from parity.verify.contract import Target
from parity.verify.difference import Difference, Held
from parity.verify.port_program import port_batch
from parity.verify.raised import raised_by_user
from parity.verify.source_case import SourceCase, state_dict

STAGE = "interface"
CHANGES = (
    "step changes the state that it is given, in place of a copy (of flax.nnx, jax.jit copies and nnx.jit does not)"
)


class _Fault(Exception):  # noqa: N818 - it carries a finding
    """A difference of this stage."""

    def __init__(self, what: str, tensor: str | None = None, line: str = "", tensors: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.difference = Difference(STAGE, what, tensor, tensors or ((tensor,) if tensor else ()), target_line=line)


def interface(case: SourceCase, target: Target, seed: int) -> Difference | Held:
    """Check what the other stages rest on.

    Args:
      case: The source.
      target: The port.
      seed: Seed of weights and data.

    Returns:
      The first fault, or what holds.
    """
    report("interface: weights there and back")
    weights = state_dict(case, seed)
    try:
        state = _called(target, "init", {name: x.copy() for name, x in weights.items()})
        _check_arrays(state)
        _check_weights(case, weights, _called(target, "weights", state))
        report("interface: a step twice from one state")
        batch, other = (port_batch(of_update, "fp32") for of_update in case.batches(seed, 2))
        _check_step(target, state, batch, other)
        report("interface: the step under jit")
        _check_traces(target, state, batch)
        if target.gradients is not None:
            traced = _called(
                target, "gradients", state, batch, how=" under jit", call=lambda f: partial(jax.eval_shape, f)
            )
            _check_names(case.params_like, traced, "gradients")
        _check_conversions(case, target, state)
    except _Fault as fault:
        return fault.difference
    names = f"{len(case.required)} tensors to the bit, step repeatable and traceable"
    return Held(names, notes=case.notes)


def _called(
    target: Target, key: str, *args: Any, how: str = "", call: Callable[..., Any] = lambda function: function
) -> Any:
    """Call a function of the port; an exception that its code raises is a fault of the port."""
    try:
        return call(getattr(target, key))(*args)
    except Exception as error:  # whatever somebody else's code raises
        raised = raised_by_user(error)
        if raised is None:
            raise
        raise _Fault(f"{key}{how} raises {raised.what}", line=raised.line) from error


def _check_traces(target: Target, state: Any, batch: Any) -> None:
    """Trace a step twice: what it left behind in the first trace shows in the second."""

    for _ in range(2):
        closed = _called(target, "step", state, batch, how=" under jit", call=_traced_anew)
        if any(isinstance(x, jax.core.Tracer) for x in closed.consts):
            raise _Fault("step keeps a value of its trace outside of the state: return it in the state")


def _traced_anew(step: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a step, whether or not it was traced before."""
    return jax.make_jaxpr(lambda state, batch: step(state, batch))


def _check_arrays(state: Any) -> None:
    leaves = jax.tree.leaves_with_path(state)
    for path, leaf in leaves:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            kind = type(leaf).__name__
            raise _Fault(
                f"init returns a state with a {kind} at {path_name(path) or 'its root'}: return a pytree of arrays"
            )
    if not leaves:
        raise _Fault("init returns a state without arrays: return a pytree of arrays")


def _check_names(required: Any, returned: Any, function: str) -> None:
    if not isinstance(returned, Mapping):
        raise _Fault(f"{function} returns {type(returned).__name__}: return a dict by PyTorch's names")
    missing = tuple(name for name in required if name not in returned)
    if missing:
        raise _Fault(
            f"{function} returns no {missing[0]}: return all parameters by PyTorch's names", missing[0], "", missing
        )


def _check_weights(case: SourceCase, weights: Tensors, returned: Any) -> None:
    """Compare the tensors that a port returns with those that it was given, to the bit."""
    _check_names(case.required, returned, "weights")
    for name, x in returned.items():
        if name not in weights:
            raise _Fault(f"weights returns {name}, which PyTorch's state_dict does not have", name)
        found, given = np.asarray(x), weights[name]
        if found.shape == given.shape and np.array_equal(found, given):
            continue
        if found.shape == given.T.shape and np.array_equal(found, given.T):
            raise _Fault(f"weights(init(w)) returns {name} transposed", name)
        if found.shape != given.shape:
            raise _Fault(f"weights(init(w)) returns {name} of shape {found.shape}, not {given.shape}", name)
        others = [other for other, w in weights.items() if w.shape == found.shape and np.array_equal(w, found)]
        instead = f": it is {others[0]}" if others else f" ({int((found != given).sum())} of {given.size} elements)"
        raise _Fault(f"weights(init(w)) returns other values of {name}{instead}", name)


def _check_conversions(case: SourceCase, target: Target, state: Any) -> None:
    """Refuse a `weights` that converts: it would round the tensors of a state in float64."""
    with jax.enable_x64(True):
        returned = _called(target, "weights", jax.tree.map(lambda x: exactly(jnp.asarray(x)), state))
        for name in case.required:
            if (dtype := np.asarray(returned[name]).dtype) == np.float32:
                raise _Fault(f"weights converts {name} to {dtype}: return the arrays of the state as they are", name)


def _check_step(target: Target, state: Any, batch: Any, other: Any) -> None:
    given = _copy(state)
    first = _called(target, "step", given, _copy(batch))
    if not isinstance(first, tuple) or len(first) != 2:
        raise _Fault(f"step returns {type(first).__name__}, not (state, loss): return two values")
    after, loss = first
    if not isinstance(loss, jax.Array | np.ndarray | np.generic | float) or np.shape(loss) != ():
        raise _Fault(
            f"step returns a loss of type {type(loss).__name__}, shape {np.shape(loss)}: return a scalar", "loss"
        )
    if not np.isfinite(float(loss)):
        raise _Fault(f"step returns the loss {float(loss)}, PyTorch's is finite", "loss")
    _check_same_structure(state, after)
    _raise_first(target, state, state, given, CHANGES)
    _called(target, "step", _copy(state), _copy(other))
    again, loss_again = _called(target, "step", _copy(state), _copy(batch))
    what = "step called twice from one state returns different results"
    if not np.array_equal(loss, loss_again):
        raise _Fault(f"{what}: losses {float(loss):.9g} and {float(loss_again):.9g}", "loss")
    _raise_first(target, state, after, again, what)


def _check_same_structure(state: Any, after: Any) -> None:
    if not _alike(state, after):
        raise _Fault("step returns a state of another structure than it is given: return what init returns")
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(after), strict=True):
        if np.shape(x) != np.shape(y):
            raise _Fault(f"step changes the shape of {path_name(path)} from {np.shape(x)} to {np.shape(y)}")


def _alike(*trees: Any) -> bool:
    one, other = (str(jax.tree.structure(tree)) for tree in trees)
    return one == other


def _raise_first(target: Target, state: Any, one: Any, other: Any, what: str) -> None:
    """Raise for the first leaf in which two states differ, by PyTorch's name if it has one."""
    for (path, x), y in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        if isinstance(y, jax.Array) and y.is_deleted():
            continue  # donated
        if not _equal(x, y):
            found, expected = (_tensors(target, tree) for tree in (other, one))
            apart = tuple(name for name, w in expected.items() if name in found and not np.array_equal(w, found[name]))
            raise _Fault(f"{what}: {path_name(path)} differs", apart[0] if apart else None, tensors=apart)


def _tensors(target: Target, state: Any) -> Tensors:
    deleted = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))
    return {} if deleted else {name: np.asarray(x) for name, x in target.weights(state).items()}


def _equal(*leaves: Any) -> bool:
    x, y = (np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves)
    return np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.inexact))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _copy(tree: Any) -> Any:
    """A copy that shares no memory: a step may donate its arguments, or write to them."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array | np.ndarray) else x, tree)
