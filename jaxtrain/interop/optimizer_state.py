"""What an optimizer has done, between `torch.optim.Optimizer.state_dict()` and the state of ours: moments and counts.

PyTorch numbers parameters by their place in `param_groups`; the names come from the groups, where the optimizer was
made of `named_parameters()`, or from the order and the shapes of the model's parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop.names import LINEAR, NameTable, leaves, unflatten
from jaxtrain.optim import SCHEDULES, Call, Expression, PlateauState, build_expression
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
"""For each of our optimizers: the fields of its state that are like the parameters, and PyTorch's names for them."""

SCALARS: dict[str, tuple[str, ...]] = {"asgd": ("eta", "mu"), "nadam": ("mu_product",)}
"""Those that are one number of all parameters; PyTorch keeps a copy with each."""

UNCOUNTED = ("muon", "sgd")
"""Those of which PyTorch does not count the updates."""

_WAYS = 10_000
"""How many ways to match parameters are followed at once, before they count as ambiguous."""

Entries = Mapping[str, Mapping[str, Any]]
"""What PyTorch keeps of each parameter, by the parameter's name."""


def names_of_groups(
    optimizer: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rename: Callable[[str], str]
) -> list[list[str]]:
    """The names of each group's parameters. `shapes`: of the model's parameters, in their order.

    `rename`: from a name as the groups have it to that of the model. Without names, all parameters of the model are
    those of the one group; or those that, in the model's order, have the shapes of the groups' moments. Raises
    `UserError` where that leaves a choice.
    """
    groups, state = optimizer["param_groups"], optimizer["state"]
    if all("param_names" in group for group in groups):
        found = [[rename(name) for name in group["param_names"]] for group in groups]
        strange = [name for group in found for name in group if name not in shapes]
        if strange:
            raise UserError(f"the optimizer has {', '.join(strange)}, which the model has not: save both of one run")
        return found
    wanted = [[_shape(state.get(number)) for number in group["params"]] for group in groups]
    left = len(shapes) - sum(map(len, wanted))
    if left < 0:
        raise UserError(
            f"the optimizer has {len(shapes) - left} parameters and the model {len(shapes)}: save both of one run"
        )
    # Those left over are in none of the groups, like a group of any shapes whose names are not wanted.
    return _matched(shapes, [*wanted, [None] * left])[:-1]


def _matched(
    shapes: Mapping[str, tuple[int, ...]], wanted: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[list[str]]:
    """The parameters dealt to the groups in their order, each where the next shape wanted is its own, or None."""
    # Where each group has got to → in how many ways, and one of them: the groups dealt to, last first.
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
        if len(following) > _WAYS:
            raise UserError(f"the optimizer's parameters could be the model's in many ways: {_REMEDY}")
        ways = following
    (count, path), *_ = ways.values()
    if count > 1:
        raise UserError(f"the optimizer's parameters could be the model's in {count} ways: {_REMEDY}")
    dealt = []
    while path is not None:
        i, path = path
        dealt.append(i)
    groups: list[list[str]] = [[] for _ in wanted]
    for name, i in zip(shapes, reversed(dealt), strict=True):
        groups[i].append(name)
    return groups


_REMEDY = (
    "make the optimizer of model.named_parameters(), which keeps their names, or of one group in the model's order"
)


def _shape(entries: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """The shape of a parameter, from its moments; None where it has none."""
    for key, value in (entries or {}).items():
        if key not in ("step", "eta", "mu", "mu_product", "row_var", "col_var") and hasattr(value, "shape"):
            return tuple(value.shape)
    if entries and "row_var" in entries:
        return (*entries["row_var"].shape[:-1], entries["col_var"].shape[-1])
    return None


def by_name(optimizer: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Mapping[str, Any]]:
    """The "state" of a `state_dict()` by the parameters' names; without those that have none."""
    numbers = (number for group in optimizer["param_groups"] for number in group["params"])
    flat = (name for group in names for name in group)
    pairs = ((name, optimizer["state"].get(number)) for name, number in zip(flat, numbers, strict=True))
    return {name: {k: v for k, v in entries.items() if v is not None} for name, entries in pairs if entries}


def updates_made(entries: Entries) -> int | None:
    """How many updates the optimizer has made, as PyTorch counts them; None where it does not."""
    steps = {name: _number(of["step"]) for name, of in entries.items() if "step" in of}
    if not steps:
        return None
    if len(set(steps.values())) > 1:
        first, other = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        raise UserError(
            f"{first} was updated {steps[first]:g} times and {other} {steps[other]:g} times, where here all are "
            "together: start the optimizer anew, from the weights alone"
        )
    count = next(iter(steps.values()))
    if count != int(count) or not 0 <= count < 2**31:
        raise UserError(f"the optimizer counts {count} updates, which is no count: save it anew")
    return int(count)


def to_jax(
    like: Any,
    expression: Expression,
    count: int,
    entries: Entries,
    names: NameTable,
    put: Callable[[np.ndarray, Any], Any],
    plateaus: Sequence[PlateauState] = (),
) -> Any:
    """The optimizer's state after `count` updates, shaped as `like` is, of what PyTorch keeps.

    `put(array, leaf of like)` takes each array away before the next is read. `plateaus`: the state of a
    `ReduceLROnPlateau` in each group. Raises `UserError` that lists what is missing, mis-shaped or not known.
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
                new[field] = put(_shared(entries, field), leaf)
            elif field in moments and leaf is not None:
                new[field] = _moment(call, moments[field], leaf, entries, names, put)
        return state._replace(**new) if new else state

    for call in [expression] if isinstance(expression, Call) else expression.values():
        _check_known(call, entries)
    return mapped(like, expression, filled)


def to_torch(
    state: Any, expression: Expression, count: int, names: NameTable, scalar_dtype: Any = np.float32
) -> dict[str, dict[str, np.ndarray]]:
    """What PyTorch keeps of each parameter after `count` updates, by the parameter's name; nothing before the first.

    `scalar_dtype`: that of "step" and of the other numbers, PyTorch's default dtype.
    """
    kept: dict[str, dict[str, np.ndarray]] = {}

    def collect(state: Any, call: Call, group: int) -> Any:
        del group
        moments, scalars = MOMENTS.get(call.function, {}), SCALARS.get(call.function, ())
        own = [
            field for field in getattr(state, "_fields", ()) if field in moments and getattr(state, field) is not None
        ]
        numbers = {field: np.asarray(getattr(state, field), scalar_dtype) for field in scalars if own}
        if own and call.function not in UNCOUNTED:
            numbers["step"] = np.asarray(count, scalar_dtype)
        for field in own:
            present = {path: leaf for path, leaf in leaves(getattr(state, field)) if leaf.shape != (0,)}
            for path, leaf in present.items():
                key = _key(call, moments[field], names, path)
                for name, tensor in names.only([path]).to_torch({path: leaf}).items():
                    kept.setdefault(name, {k: v.copy() for k, v in numbers.items()})[key] = tensor
        return state

    if count:
        mapped(state, expression, collect)
    return kept


def rate(call: Call, count: int) -> jax.Array:
    """float[]: the learning rate of the update numbered `count`; of a plateau, the first."""
    schedule = call.arguments["learning_rate"]
    if isinstance(schedule, Call) and schedule.function == "reduce_lr_on_plateau":
        schedule = schedule.arguments["learning_rate"]
    made = build_expression(schedule, SCHEDULES, {}) if isinstance(schedule, Call) else schedule
    return rate_at(made, jnp.array(count, np.int32))


def mapped(state: Any, expression: Expression, fn: Callable[[Any, Call, int], Any], group: int = 0) -> Any:
    """The state with `fn(part, its group's call, the group's number)` for every transformation's own part."""
    if hasattr(state, "inner_states"):
        inner = {
            name: mapped(part, expression, fn, int(name)) if name.isdigit() else part
            for name, part in state.inner_states.items()
        }
        return state._replace(inner_states=inner)
    if hasattr(state, "inner_state"):
        return state._replace(inner_state=mapped(state.inner_state, expression, fn, group))
    if type(state) is tuple:
        return tuple(mapped(part, expression, fn, group) for part in state)
    call = expression if isinstance(expression, Call) else list(expression.values())[group]
    return fn(state, call, group)


def _moment(
    call: Call, key: str, like: Any, entries: Entries, names: NameTable, put: Callable[[np.ndarray, Any], Any]
) -> Any:
    """A tree of moments; a leaf of no elements, as Adafactor has where it does not factor, stays as it is."""
    present = {path: leaf for path, leaf in leaves(like) if leaf.shape != (0,)}
    tensors = {}
    for path, leaf in present.items():
        own = _key(call, key, names, path)
        for name in names.only([path]).torch_order({path: leaf}):
            if own in entries.get(name, {}):
                tensors[name] = entries[name][own]
    try:
        filled = names.only(present).to_jax(tensors, present, put)
    except UserError as error:
        raise UserError(f"{key} of the optimizer: {error}") from error
    empty = {path: put(np.zeros([0]), leaf) for path, leaf in leaves(like) if leaf.shape == (0,)}
    return unflatten({**filled, **empty}, like)


def _key(call: Call, key: str, names: NameTable, path: str) -> str:
    """PyTorch's name of a moment: what is a row of its matrix is a column of ours, where that is transposed."""
    swapped = {"row_var": "col_var", "col_var": "row_var"}
    return swapped.get(key, key) if call.function == "adafactor" and names.params[path].layout is LINEAR else key


def _shared(entries: Entries, key: str) -> np.ndarray:
    """The one value that all parameters have a copy of."""
    values = {name: _number(of[key]) for name, of in entries.items() if key in of}
    if len(set(values.values())) != 1:
        raise UserError(
            f"{key} is {sorted(set(values.values()))} in the optimizer, where all parameters are to share it"
        )
    return np.asarray(next(iter(values.values())))


def _check_known(call: Call, entries: Entries) -> None:
    known = {*MOMENTS[call.function].values(), *SCALARS.get(call.function, ()), "step"}
    for name, of in entries.items():
        for key in of.keys() - known:
            raise UserError(f"{key} of {name} is nothing {call.function} keeps: say --optimizer, or save it anew")


def _number(value: Any) -> float:
    """A number out of its array of one element. Raises `UserError` for anything else."""
    if isinstance(value, int | float):
        return float(value)
    if getattr(value, "shape", None) != ():
        raise UserError(f"the optimizer holds {value!r} where a number is to be: save it anew")
    return float(np.asarray(value))
