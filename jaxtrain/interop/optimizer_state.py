"""Conversion of optimizer states, moments and counts, from and to `torch.optim.Optimizer.state_dict()`.

PyTorch numbers parameters by their order in `param_groups`. Names come from the groups, if the optimizer was created
from `named_parameters()`, or from the order and the shapes of the model's parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop import bitsandbytes
from jaxtrain.interop.names import LINEAR, NameTable, leaves, unflatten
from jaxtrain.optim import SCHEDULES, Blockwise, Call, Expression, PlateauState, build_expression
from jaxtrain.paths import path_name
from jaxtrain.step import rate_at

MOMENTS: dict[str, dict[str, str]] = {
    "adadelta": {"e_g": "square_avg", "e_x": "acc_delta"},
    "adafactor": {"row_var": "row_var", "col_var": "col_var", "variance": "variance"},
    "adagrad": {"sum": "sum"},
    "adam": {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"},
    "adamw": {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"},
    "adamax": {"mu": "exp_avg", "norm": "exp_inf"},
    "asgd": {"ax": "ax"},
    "muon": {"momentum_buffer": "momentum_buffer"},
    "nadam": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "radam": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "rmsprop": {"nu": "square_avg", "mu": "grad_avg", "momentum_buffer": "momentum_buffer"},
    "rprop": {"prev": "prev", "step_size": "step_size"},
    "sgd": {"momentum_buffer": "momentum_buffer"},
}
MOMENTS |= bitsandbytes.STATES
"""PyTorch's names of the state fields that have the shapes of the parameters, by optimizer."""

SCALARS: dict[str, tuple[str, ...]] = {"asgd": ("eta", "mu"), "nadam": ("mu_product",)}
"""State fields that are one number for all parameters; PyTorch stores a copy with each parameter."""

UNCOUNTED = ("muon", "sgd")
"""Optimizers whose updates PyTorch does not count."""

_MAX_MATCHES = 10_000
"""Number of partial assignments of parameters to groups above which they count as ambiguous."""

Entries = Mapping[str, Mapping[str, Any]]
"""PyTorch's state of every parameter, by name."""


def group_parameter_names(
    optimizer: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rename: Callable[[str], str]
) -> list[list[str]]:
    """Return the names of the parameters of every group.

    Without names in the groups, parameters are assigned in the order of the model by the shapes of their moments.
    Raises `UserError` if that is ambiguous.

    Args:
      optimizer: `state_dict()` of the optimizer.
      shapes: Shapes of the model's parameters, in order.
      rename: Function from a name in the groups to the name in the model.
    """
    groups, state = optimizer["param_groups"], optimizer["state"]
    # FSDP writes names in place of numbers.
    key = "params" if all(isinstance(name, str) for group in groups for name in group["params"]) else "param_names"
    if all(key in group for group in groups):
        found = [[rename(name) for name in group[key]] for group in groups]
        strange = [name for group in found for name in group if name not in shapes]
        if strange:
            raise UserError(f"the optimizer has {', '.join(strange)}, which the model lacks: save both from one run")
        return found
    wanted = [[_shape(state.get(number)) for number in group["params"]] for group in groups]
    left = len(shapes) - sum(map(len, wanted))
    if left < 0:
        raise UserError(
            f"the optimizer has {len(shapes) - left} parameters and the model {len(shapes)}: save both from one run"
        )
    # Parameters in no group form one more group of any shapes, whose names are discarded.
    return _match_parameters(shapes, [*wanted, [None] * left])[:-1]


def _match_parameters(
    shapes: Mapping[str, tuple[int, ...]], wanted: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[list[str]]:
    """Assign parameters in order to groups whose next shape is equal or unknown (None)."""
    # Position in every group → number of assignments, and one of them as a linked list, last first.
    ways: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(wanted): (1, None)}
    for name, shape in shapes.items():
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for at, (count, path) in ways.items():
            for i, group in enumerate(wanted):
                if at[i] < len(group) and group[at[i]] in (shape, None):
                    there = (*at[:i], at[i] + 1, *at[i + 1 :])
                    before = following.get(there, (0, None))[0]
                    following[there] = (before + count, (i, path))
        if not following:
            raise UserError(f"no order of the optimizer's parameters has {name} {shape} where it must be: {_REMEDY}")
        if len(following) > _MAX_MATCHES:
            raise UserError(f"the optimizer's parameters could be the model's in many ways: {_REMEDY}")
        ways = following
    (count, path), *_ = ways.values()
    if count > 1:
        raise UserError(f"the optimizer's parameters could be the model's in {count} ways: {_REMEDY}")
    assigned = []
    while path is not None:
        i, path = path
        assigned.append(i)
    groups: list[list[str]] = [[] for _ in wanted]
    for name, i in zip(shapes, reversed(assigned), strict=True):
        groups[i].append(name)
    return groups


_REMEDY = (
    "create the optimizer from model.named_parameters(), which stores names, or with one group in the model's order"
)


def _shape(entries: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """Return the shape of a parameter from its moments, None without any."""
    if entries and "state1" in entries:
        return tuple(entries["state1"].shape)
    for key, value in (entries or {}).items():
        if key not in ("step", "eta", "mu", "mu_product", "row_var", "col_var") and hasattr(value, "shape"):
            return tuple(value.shape)
    if entries and "row_var" in entries:
        return (*entries["row_var"].shape[:-1], entries["col_var"].shape[-1])
    return None


def state_by_name(optimizer: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Mapping[str, Any]]:
    """Return the "state" of a `state_dict()` by parameter name, without empty entries."""
    numbers = (number for group in optimizer["param_groups"] for number in group["params"])
    flat = (name for group in names for name in group)
    pairs = ((name, optimizer["state"].get(number)) for name, number in zip(flat, numbers, strict=True))
    return {name: {k: v for k, v in entries.items() if v is not None} for name, entries in pairs if entries}


def update_count(entries: Entries) -> int | None:
    """Return the number of updates that PyTorch counted, None if it does not count them."""
    steps = {name: _number(of["step"]) for name, of in entries.items() if "step" in of}
    if not steps:
        return None
    if len(set(steps.values())) > 1:
        first, other = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        raise UserError(
            f"{first} was updated {steps[first]:g} times and {other} {steps[other]:g} times, but counts must be equal: "
            "import the weights only"
        )
    count = next(iter(steps.values()))
    if count != int(count) or not 0 <= count < 2**31:
        raise UserError(f"the number of updates must be a count, got {count}: save the optimizer again")
    return int(count)


def to_jax(
    like: Any,
    expression: Expression,
    count: int,
    entries: Entries,
    names: NameTable,
    *,
    put: Callable[[np.ndarray, Any], Any],
    plateaus: Sequence[PlateauState] = (),
) -> Any:
    """Convert PyTorch's state of every parameter to the state of an optimizer.

    Args:
      like: State with the structure and shapes of the result.
      expression: Optimizer.
      count: Number of updates.
      entries: PyTorch's state of every parameter, by name.
      names: Name table of the parameters.
      put: Function of (array, leaf of `like`) that stores each array before the next is read.
      plateaus: State of the `ReduceLROnPlateau` of every group.

    Raises:
      UserError: Entries are missing, mis-shaped or unknown.
    """

    def filled(state: Any, call: Call, group: int) -> Any:
        if isinstance(state, PlateauState):
            return jax.tree.map(lambda x, leaf: put(np.asarray(x), leaf), plateaus[group], state)
        moments, scalars = MOMENTS.get(call.function, {}), SCALARS.get(call.function, ())
        new = {}
        for field, leaf in zip(getattr(state, "_fields", ()), state, strict=True):
            if field == "count":
                new[field] = put(np.asarray(count, np.int32), leaf)
            elif field == "learning_rate":
                new[field] = put(np.asarray(rate(call, max(count - 1, 0))), leaf)
            elif field in scalars:
                new[field] = put(_shared_scalar(entries, field), leaf)
            elif field in moments and leaf is not None:
                new[field] = _moment(call, moments[field], leaf, entries, names, put)
        return state._replace(**new) if new else state

    for call in [expression] if isinstance(expression, Call) else expression.values():
        _check_known(call, entries)
    return map_states(like, expression, filled)


def to_torch(
    state: Any, expression: Expression, count: int, names: NameTable, scalar_dtype: Any = np.float32
) -> dict[str, dict[str, Any]]:
    """Return PyTorch's state of every parameter after `count` updates, by name; empty before the first update.

    `scalar_dtype` is the dtype of "step" and of the other numbers.
    """
    entries: dict[str, dict[str, Any]] = {}

    def collect(state: Any, call: Call, group: int) -> Any:
        del group
        moments, scalars = MOMENTS.get(call.function, {}), SCALARS.get(call.function, ())
        own = [
            field for field in getattr(state, "_fields", ()) if field in moments and getattr(state, field) is not None
        ]
        numbers = {field: np.asarray(getattr(state, field), scalar_dtype) for field in scalars if own}
        if own and call.function not in UNCOUNTED:
            numbers["step"] = np.asarray(count, scalar_dtype)
        if call.function in bitsandbytes.STATES:
            _collect_bitsandbytes(entries, {moments[field]: getattr(state, field) for field in own}, count, names)
            return state
        for field in own:
            present = {path: leaf for path, leaf in leaves(getattr(state, field)) if leaf.shape != (0,)}
            for path, leaf in present.items():
                key = _key(call, moments[field], names, path)
                for name, tensor in names.only([path]).to_torch({path: leaf}).items():
                    entries.setdefault(name, {k: v.copy() for k, v in numbers.items()})[key] = tensor
        return state

    if count:
        map_states(state, expression, collect)
    return entries


def rate(call: Call, count: int) -> jax.Array:
    """Return the learning rate of update `count`, float []; for a plateau, the initial one."""
    schedule = call.arguments["learning_rate"]
    if isinstance(schedule, Call) and schedule.function == "reduce_lr_on_plateau":
        schedule = schedule.arguments["learning_rate"]
    made = build_expression(schedule, SCHEDULES, {}) if isinstance(schedule, Call) else schedule
    return rate_at(made, jnp.array(count, np.int32))


def map_states(state: Any, expression: Expression, fn: Callable[[Any, Call, int], Any], group: int = 0) -> Any:
    """Apply `fn(part, call, group number)` to the state of every transformation."""
    if hasattr(state, "inner_states"):
        inner = {
            name: map_states(part, expression, fn, int(name)) if name.isdigit() else part
            for name, part in state.inner_states.items()
        }
        return state._replace(inner_states=inner)
    if hasattr(state, "inner_state"):
        return state._replace(inner_state=map_states(state.inner_state, expression, fn, group))
    if type(state) is tuple:
        return tuple(map_states(part, expression, fn, group) for part in state)
    call = expression if isinstance(expression, Call) else list(expression.values())[group]
    return fn(state, call, group)


def _moment(
    call: Call, key: str, like: Any, entries: Entries, names: NameTable, put: Callable[[np.ndarray, Any], Any]
) -> Any:
    """Convert a tree of moments; empty leaves, as those of Adafactor without factoring, stay empty."""
    if call.function in bitsandbytes.STATES:
        return _moment_of_bitsandbytes(call, key, like, entries, names, put)
    present = {path: leaf for path, leaf in leaves(like) if leaf.shape != (0,)}
    tensors, never = {}, list[tuple[str, str]]()
    for path, leaf in present.items():
        own = _key(call, key, names, path)
        for name in names.only([path]).torch_order({path: leaf}):
            if own in entries.get(name, {}):
                tensors[name] = entries[name][own]
            elif name not in entries:
                never.append((name, path))
    if never and tensors:
        listed = ", ".join(name for name, _ in never)
        patterns = ",".join(sorted({path for _, path in never}))
        raise UserError(
            f"the optimizer has no state of {listed}, which were never updated: freeze them by --frozen '{patterns}',"
            " or import the weights alone"
        )
    try:
        filled = names.only(present).to_jax(tensors, present, put)
    except UserError as error:
        raise UserError(f"{key} of the optimizer: {error}") from error
    empty = {path: put(np.zeros([0]), leaf) for path, leaf in leaves(like) if leaf.shape == (0,)}
    return unflatten({**filled, **empty}, like)


def _moment_of_bitsandbytes(
    call: Call, key: str, like: Any, entries: Entries, names: NameTable, put: Callable[[np.ndarray, Any], Any]
) -> Any:
    """Convert a tree of moments, some of which are in 8 bits: codes as arrays, their magnitudes by block."""
    plain = jax.tree.map(lambda m: m.codes if _in_8bit(m) else m, like, is_leaf=_in_8bit)
    codes = dict(leaves(_moment(replace(call, function="adamw"), key, plain, entries, names, put)))

    def joined(path: Any, moment: Any) -> Any:
        name = path_name(path)
        if not _in_8bit(moment):
            return codes[name]
        tensors = names.only([name]).torch_order({name: moment.codes})
        found = bitsandbytes.magnitudes(entries, tensors, key)
        if found.shape != moment.absmax.shape:
            raise UserError(f"{key} of {name} has {found.size} blocks in place of {moment.absmax.size}: save it again")
        return Blockwise(codes[name], put(found, moment.absmax))

    return jax.tree_util.tree_map_with_path(joined, like, is_leaf=_in_8bit)


def _collect_bitsandbytes(
    entries: dict[str, dict[str, Any]], moments: Mapping[str, Any], count: int, names: NameTable
) -> None:
    for key, tree in moments.items():
        for path, moment in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_in_8bit):
            name = path_name(path)
            if _in_8bit(moment):
                found = bitsandbytes.to_entries(moment, key, name, names)
            else:
                found = {tensor: {key: x} for tensor, x in names.only([name]).to_torch({name: moment}).items()}
            for tensor, of in found.items():
                entries.setdefault(tensor, {"step": count, bitsandbytes.WRAPPED: {}})[bitsandbytes.WRAPPED].update(of)


def _in_8bit(moment: Any) -> bool:
    return isinstance(moment, Blockwise)


def _key(call: Call, key: str, names: NameTable, path: str) -> str:
    """Return PyTorch's name of a moment; rows and columns are exchanged for transposed matrices."""
    swapped = {"row_var": "col_var", "col_var": "row_var"}
    return swapped.get(key, key) if call.function == "adafactor" and names.params[path].layout is LINEAR else key


def _shared_scalar(entries: Entries, key: str) -> np.ndarray:
    """Return the value that all parameters share."""
    values = {name: _number(of[key]) for name, of in entries.items() if key in of}
    if len(set(values.values())) != 1:
        raise UserError(
            f"{key} is {sorted(set(values.values()))} in the optimizer, but must be equal for all parameters"
        )
    return np.asarray(next(iter(values.values())))


def _check_known(call: Call, entries: Entries) -> None:
    known = {*MOMENTS[call.function].values(), *SCALARS.get(call.function, ()), "step"}
    if call.function in bitsandbytes.STATES:
        known |= {f"{part}{key[-1]}" for part in ("absmax", "qmap") for key in known - {"step"}}
    for name, of in entries.items():
        for key in of.keys() - known:
            raise UserError(f"{key} of {name} is not a state of {call.function}: set --optimizer, or save it again")


def _number(value: Any) -> float:
    """Return a number, or the element of a scalar array. Raises `UserError` for anything else."""
    if isinstance(value, int | float):
        return float(value)
    if getattr(value, "shape", None) != ():
        raise UserError(f"the optimizer contains {value!r} where a number must be: save it again")
    return float(np.asarray(value))
