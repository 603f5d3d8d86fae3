"""Propose and prove which PyTorch tensor each JAX parameter is.

Shapes leave few candidates: a tensor as it is, transposed, with the axes of a convolution permuted, after a flattened
image, or one of a stack of layers. Values decide what shapes leave open. All tensors that could be mistaken for each
other get the same value, equal to its own transpose, so that the two models agree under any assignment. Then one tensor
is perturbed in PyTorch: its counterpart, and its layout, are those that change JAX's loss by the same amount. Each
tensor is decided on its own; names decide only among tensors that do not change the loss.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import jax
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from jaxtrain.errors import UserError
from jaxtrain.interop import (
    AS_IS,
    CONV,
    LAYER,
    LINEAR,
    Layout,
    NameTable,
    TorchParam,
    bias_to_heads,
    leaves,
    linear_after_flatten,
    linear_from_heads,
    linear_to_heads,
    unflatten,
)
from jaxtrain.step import validated
from parity.case import Case
from parity.oracle.in_jax import in_float64
from parity.oracle.in_torch import InFloat64
from parity.record import Tensors
from parity.torch_side import seeded_model, tensor

Shape = tuple[int, ...]
Convolution = torch.nn.modules.conv._ConvNd
OWNERS = (torch.nn.Linear, Convolution)
"""Modules whose weight has its axes in another order in JAX."""
SAME = 1e-6
"""Largest relative distance of two equal changes of a float64 loss."""
UNMOVED = 1e-9
"""A change of the loss below this part of it counts as none."""
WORDS = {"weight": "kernel", "scale": "kernel", "embedding": "kernel", "gamma": "kernel", "beta": "bias"}
WORDS |= {"running_mean": "mean", "running_var": "var", "num_batches_tracked": "count"}


@dataclass(frozen=True)
class Probe:
    """The losses of both models in float64: from PyTorch's tensors by name, and from JAX's (parameters, model
    state)."""

    torch_loss: Callable[[Tensors], float]
    jax_loss: Callable[[Any, Any], float]


def with_tables(case: Case) -> Case:
    """Return the case with the name tables that it leaves out.

    Args:
      case: A case, with or without `names` and `buffers`.

    Returns:
      The same case if it has all its tables, else a copy with the missing ones proposed (`propose`).

    Raises:
      UserError: Some tensors or leaves have no counterpart.
    """
    if case.has_tables:
        return case
    names, buffers = _propose(
        seeded_model(case, 0), case.params_like, case.state_like, probe_of(case), (case.names, case.buffers)
    )
    return replace(case, names=names, buffers=buffers)


def propose(torch_model: torch.nn.Module, params_like: Any, probe: Probe | None = None) -> NameTable:
    """Propose the table from JAX's parameters to PyTorch's.

    Args:
      torch_model: The PyTorch model.
      params_like: Pytree with the shapes of the JAX parameters.
      probe: The losses of both models, which decide what shapes leave open; None lets names decide it.

    Returns:
      The table.

    Raises:
      UserError: Some tensors or leaves have no counterpart; the message lists all of them.

    Example:
      >>> like = {"dense": {"kernel": np.zeros((4, 10)), "bias": np.zeros(10)}}
      >>> print(as_source(propose(torch.nn.Linear(4, 10), like)))
      NameTable(
          {
              "dense/bias": TorchParam("bias", AS_IS),
              "dense/kernel": TorchParam("weight", LINEAR),
          },
          tied={},
      )
    """
    return _propose(torch_model, params_like, None, probe)[0]


def as_source(table: NameTable) -> str:
    """Return the table as Python source, in names of `jaxtrain.interop`."""
    params = [f'        "{path}": TorchParam("{p.name}", {p.layout.source}),' for path, p in table.params.items()]
    tied = ", ".join(f'"{alias}": "{name}"' for alias, name in table.tied.items())
    return "\n".join(["NameTable(", "    {", *params, "    },", f"    tied={{{tied}}},", ")"])


def probe_of(case: Case) -> Probe:
    """Return the losses of both models on the case's first batch, in evaluation mode, without dropout."""
    model = seeded_model(case, 0).double().eval()
    batch = {name: _wide(x) for name, x in case.batch(0, case.rows).items()}
    tensors = {name: tensor(x, "fp64") for name, x in batch.items()}

    def torch_loss(values: Tensors) -> float:
        with torch.no_grad():
            for name, own in model.state_dict().items():
                own.copy_(torch.from_numpy(np.asarray(values[name])))
        with InFloat64():
            total, weight = case.torch_loss(model, tensors)
        return total.item() / float(weight)

    @jax.jit
    def compute(params: Any, state: Any) -> Any:
        loss, *_ = in_float64(validated(case.loss_fn))(params, batch, None, state)
        return loss.total / loss.weight

    def jax_loss(params: Any, state: Any) -> float:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return float(compute(*jax.tree.map(_wide, (params, state))))

    return Probe(torch_loss, jax_loss)


@dataclass(frozen=True)
class Proof:
    """Evidence that the weights correspond, each tensor being used once.

    Attributes:
      tensors: Number of PyTorch's parameters.
      buffers: Number of PyTorch's buffers.
      leaves: Number of JAX's leaves.
      tied: From tensors that are aliases to the tensor they share.
      distances: For each parameter that changes the loss, the relative distance of the two losses' changes.
      unproven: Parameters that do not change the loss.
    """

    tensors: int
    buffers: int
    leaves: int
    tied: Mapping[str, str]
    distances: Mapping[str, float]
    unproven: tuple[str, ...]


def prove(case: Case) -> Proof:
    """Prove that every tensor is used once and that each changes both losses alike.

    Every element of a tensor is perturbed by another random amount, which tells the tensor from its transpose and from
    any other tensor of its shape.

    Args:
      case: The case; tables that it leaves out are proposed.

    Returns:
      The proof.

    Raises:
      UserError: Tensors or leaves are left over, used twice or of another shape (all in one line); the models differ at
        the same weights; or a tensor changes the two losses differently.
    """
    case = with_tables(case)
    model, (table, buffers) = _jittered(seeded_model(case, 0)), case.tables
    weights = {name: x.numpy().copy() for name, x in model.state_dict().items()}
    ties = {**_ties(model), **table.tied}
    params_used = _used(table, case.params_like)
    buffers_used = [] if buffers is None else _used(buffers, case.state_like)

    def to_jax(weights: Tensors) -> tuple[Any, Any]:
        params = {name: x for name, x in weights.items() if name not in buffers_used}
        state = {name: x for name, x in weights.items() if name in buffers_used}
        return (
            table.to_jax(params, like=case.params_like),
            None if buffers is None else buffers.to_jax(state, like=case.state_like),
        )

    twice = sorted(name for name, times in Counter([*params_used, *buffers_used]).items() if times > 1)
    try:
        params, state = to_jax(weights)
    except UserError as error:
        raise UserError("; ".join([str(error), *(f"used twice {name}" for name in twice)])) from None
    if twice:
        raise UserError(f"the tensors do not fit the model: {'; '.join(f'used twice {name}' for name in twice)}")

    probe = probe_of(case)
    theirs, ours = probe.torch_loss(weights), probe.jax_loss(params, state)
    if not _apart(ours, theirs, theirs) <= SAME:
        raise UserError(
            f"the models of {case.name} differ at the same weights, in losses {theirs:.9g} and {ours:.9g}: "
            "make them agree before proving their weights"
        )
    distances: dict[str, float] = {}
    unproven = []
    for name in params_used:
        changed = {**weights, name: weights[name] + _random(name, weights[name].shape)}
        changed |= {alias: changed[name] for alias, of in ties.items() if of == name and alias in weights}
        changes = probe.jax_loss(*to_jax(changed)) - ours, probe.torch_loss(changed) - theirs
        if max(map(abs, changes)) <= UNMOVED * abs(theirs):
            unproven.append(name)
        else:
            distances[name] = _apart(*changes, theirs)
    wrong = [f"{name} ({apart:.1e} apart)" for name, apart in distances.items() if not apart <= SAME]
    if wrong:
        raise UserError(f"perturbed alone, these change the losses of {case.name} differently: {', '.join(wrong)}")
    n_leaves = len([*leaves(case.params_like), *leaves(case.state_like or {})])
    tied = {alias: name for alias, name in ties.items() if alias in weights}
    return Proof(len(weights) - len(buffers_used), len(buffers_used), n_leaves, tied, distances, tuple(unproven))


@dataclass(frozen=True)
class _Unit:
    """A tensor, or a stack of one tensor from each layer, that one leaf may hold.

    Attributes:
      name: Name as in a table.
      tensors: Names of the tensors.
      shape: Shape of each tensor.
      owner: The class of `OWNERS` whose weight it is.
    """

    name: str
    tensors: tuple[str, ...]
    shape: Shape
    owner: type | None

    @property
    def stacked(self) -> bool:
        return LAYER in self.name

    @property
    def kin(self) -> str:
        """A key that is equal for tensors that could be mistaken for each other."""
        return f"{sorted(self.shape) if len(self.shape) == 2 else self.shape} {len(self.tensors) * self.stacked}"


Leaves = Mapping[str, Shape]
Choice = Mapping[str, tuple[_Unit, Layout]]


def _propose(
    model: torch.nn.Module,
    params_like: Any,
    state_like: Any,
    probe: Probe | None,
    given: tuple[NameTable | None, NameTable | None] = (None, None),
) -> tuple[NameTable, NameTable | None]:
    ties = _ties(model)
    params = {name: tuple(p.shape) for name, p in model.named_parameters()}
    # If the JAX model has no state, PyTorch's buffers have no counterpart: a causal mask, for instance.
    buffers = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in {**params, **ties}}
    owners = {f"{name}.weight": kind for name, m in model.named_modules() for kind in OWNERS if isinstance(m, kind)}
    channels = {shape[0] for shape in params.values() if len(shape) > 2}
    sides = [_Side(params, params_like, owners, channels)]
    if state_like is not None:
        sides.append(_Side(buffers, state_like, {}, set()))
    faults = [fault for side in sides for fault in side.faults()]
    if faults:
        raise UserError(f"the tensors do not correspond: {'; '.join(faults)}: add them to a NameTable")
    costs = (
        _by_names if probe is None or not any(side.ambiguous() for side in sides) else _by_values(model, sides, probe)
    )
    chosen = [side.assigned(costs) for side in sides]
    table = given[0] or _table(chosen[0], {alias: name for alias, name in ties.items() if alias not in buffers})
    return table, (given[1] or _table(chosen[1], {})) if state_like is not None else None


class _Side:
    """Tensors, and the leaves that they must fill."""

    def __init__(self, shapes: Mapping[str, Shape], like: Any, owners: Mapping[str, type], channels: set[int]) -> None:
        self.like = like
        self.leaves = {path: tuple(leaf.shape) for path, leaf in leaves(like)}
        self.channels = channels
        plain = [_Unit(name, (name,), shape, owners.get(name)) for name, shape in shapes.items()]
        stacks = [_Unit(name, of, shapes[of[0]], owners.get(of[0])) for name, of in _stacks(shapes).items()]
        whole = {path for path in self.leaves if any(self._whole(unit, path) for unit in [*plain, *stacks])}
        self.of_heads = self.leaves.keys() - whole
        filled = {path for path in self.leaves for unit in plain if self.layouts(unit, path)}
        stacks = [unit for unit in stacks if any(self.layouts(unit, path) for path in self.leaves.keys() - filled)]
        within = {name for unit in stacks for name in unit.tensors}
        self.units = [unit for unit in plain if unit.name not in within] + stacks
        order = {name: i for i, name in enumerate(shapes)}
        self.units.sort(key=lambda unit: order[unit.tensors[0]])

    def layouts(self, unit: _Unit, path: str) -> list[Layout]:
        """The layouts in which `unit` can fill the leaf, the likeliest first; heads get a separate axis only where
        nothing else fits."""
        if path in self.of_heads and (shape := self._each(unit, path)):
            return _of_heads(unit.shape, shape)
        return self._whole(unit, path)

    def _each(self, unit: _Unit, path: str) -> Shape | None:
        """Shape of the leaf, per layer if `unit` is a stack; None if the number of layers differs."""
        shape = self.leaves[path]
        if not unit.stacked:
            return shape
        return shape[1:] if shape[:1] == (len(unit.tensors),) else None

    def _whole(self, unit: _Unit, path: str) -> list[Layout]:
        shape = self._each(unit, path)
        if shape is None:
            return []
        found = [AS_IS] if shape == unit.shape else []
        if len(shape) == 2 and shape == unit.shape[::-1]:
            found = [LINEAR, *found] if unit.owner is torch.nn.Linear else [*found, LINEAR]
            found += [linear_after_flatten(*image) for image in _images(shape[0], self.channels)]
        if len(shape) == len(unit.shape) > 2 and shape == (*unit.shape[2:], unit.shape[1], unit.shape[0]):
            found = [CONV] if unit.owner is Convolution or not found else found
        return found

    def ambiguous(self) -> bool:
        options = [[len(self.layouts(unit, path)) for path in self.leaves] for unit in self.units]
        return any(sum(row) > 1 for row in [*options, *zip(*options, strict=True)])

    def faults(self) -> list[str]:
        """Lines for what is left over under every assignment."""
        chosen = self.assigned(_by_names)
        taken = {unit.name for unit, _ in chosen.values()}
        return [f"no tensor for {path} {shape}" for path, shape in self.leaves.items() if path not in chosen] + [
            f"no leaf for {unit.name} {unit.shape}" for unit in self.units if unit.name not in taken
        ]

    def assigned(self, costs: "Costs") -> Choice:
        """The cheapest assignment of units to leaves, without pairs that no layout fits."""
        paths = sorted(self.leaves, key=_natural)
        impossible = 1e6
        prices = np.full((len(self.units), len(paths)), impossible)
        best: dict[tuple[int, int], Layout] = {}
        for i, unit in enumerate(self.units):
            for j, path in enumerate(paths):
                if layouts := self.layouts(unit, path):
                    ways = costs(self, unit, path, layouts)
                    best[i, j] = layouts[int(np.argmin(ways))]
                    misplaced = abs(i / len(self.units) - j / len(paths))
                    prices[i, j] = min(ways) + 0.02 * (_unlike(unit.name, path) + 0.3 * misplaced)
        pairs = zip(*linear_sum_assignment(prices), strict=True)
        return {paths[j]: (self.units[i], best[i, j]) for i, j in pairs if (i, j) in best}


Costs = Callable[[_Side, _Unit, str, list[Layout]], list[float]]
"""Cost of each layout of a unit for a leaf, 0 to 1."""


def _by_names(side: _Side, unit: _Unit, path: str, layouts: list[Layout]) -> list[float]:
    del side, unit, path
    return [0.0] * len(layouts)


def _by_values(model: torch.nn.Module, sides: Sequence[_Side], probe: Probe) -> Costs:
    """Costs by the changes of the two losses, from values under which every assignment is equal."""
    flattened = {
        unit.kin
        for side in sides
        for unit in side.units
        for path in side.leaves
        if any(layout.source.startswith(linear_after_flatten.__name__) for layout in side.layouts(unit, path))
    }
    still = {
        unit.name: [_undecided(unit, unit.kin in flattened)] * len(unit.tensors) for s in sides for unit in s.units
    }
    weights = {name: np.asarray(x, np.float64) for name, x in model.state_dict().items()}
    for side in sides:
        for unit in side.units:
            weights |= dict(zip(unit.tensors, still[unit.name], strict=True))
    aliases = _ties(model)
    trees: list[dict[str, Any]] = []
    for side in sides:
        fits = {path: next((u, ls[0]) for u in side.units if (ls := side.layouts(u, path))) for path in side.leaves}
        trees.append({path: _filled(unit, layout, still[unit.name]) for path, (unit, layout) in fits.items()})

    def by_torch(perturbed: Tensors) -> float:
        now = {**weights, **perturbed}
        return probe.torch_loss({name: now[aliases.get(name, name)] for name in weights})

    def by_jax(side: _Side | None = None, **perturbed: Any) -> float:
        now = [{**tree, **perturbed} if own is side else tree for own, tree in zip(sides, trees, strict=True)]
        params, state = [*(unflatten(tree, side.like) for tree, side in zip(now, sides, strict=True)), None][:2]
        return probe.jax_loss(params, state)

    theirs, ours = by_torch({}), by_jax()
    torch_changes: dict[str, float] = {}
    jax_changes: dict[tuple[str, bytes], float] = {}

    def costs(side: _Side, unit: _Unit, path: str, layouts: list[Layout]) -> list[float]:
        perturbed = [x + move for x, move in zip(still[unit.name], _moves(unit), strict=True)]
        if unit.name not in torch_changes:
            torch_changes[unit.name] = by_torch(dict(zip(unit.tensors, perturbed, strict=True))) - theirs
        found = []
        for layout in layouts:
            leaf = _filled(unit, layout, perturbed)
            key = path, leaf.tobytes()
            if key not in jax_changes:
                jax_changes[key] = by_jax(side, **{path: leaf}) - ours
            apart = _apart(jax_changes[key], torch_changes[unit.name], theirs)
            # On a logarithmic scale: models that differ slightly still distinguish their tensors.
            found.append(float(np.clip(1 + np.log10(apart + 1e-12) / 9, 0, 1)))
        return found

    return costs


def _undecided(unit: _Unit, flattened: bool) -> np.ndarray:
    """The value shared by all of the unit's kin: equal to its transpose, and constant over a flattened image."""
    if len(unit.shape) != 2:
        low, high = (0.2, 1.0) if len(unit.shape) < 2 else (-1.0, 1.0) / np.sqrt(np.prod(unit.shape[1:]))
        return _rng(unit.kin).uniform(low, high, unit.shape)
    rows, columns = sorted(unit.shape)
    x = _rng(unit.kin).standard_normal((rows, columns)) / np.sqrt(columns)
    x = x if unit.shape == (rows, columns) else x.T
    if rows == columns:
        x = (x + x.T) / 2
    if flattened:
        x = np.broadcast_to(x.mean() if rows == columns else x[:, :1], x.shape)
    return x.copy()


def _moves(unit: _Unit) -> list[np.ndarray]:
    """The perturbation of each tensor of the unit: the same for all its kin, and not equal to its transpose."""
    rows, columns = sorted(unit.shape) if len(unit.shape) == 2 else (0, 0)
    moves = []
    for i in range(len(unit.tensors)):
        move = _random(f"{unit.kin} {i}", (rows, columns) if rows else unit.shape)
        moves.append(move if move.shape == unit.shape else move.T)
    return moves


def _random(seed: str, shape: Shape) -> np.ndarray:
    """Positive random numbers, so that a running variance stays positive."""
    return _rng(f"move {seed}").uniform(0.0, 0.3, shape) / np.sqrt(shape[-1] if len(shape) > 1 else 1)


def _rng(seed: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(seed.encode()))


def _apart(ours: float, theirs: float, loss: float) -> float:
    """The relative distance of two changes of `loss`."""
    distance = abs(ours - theirs) / max(abs(ours), abs(theirs), UNMOVED * abs(loss), 1e-300)
    return distance if np.isfinite(distance) else np.inf


def _filled(unit: _Unit, layout: Layout, tensors: Sequence[np.ndarray]) -> np.ndarray:
    layers = [layout.to_jax(x) for x in tensors]
    return np.stack(layers) if unit.stacked else layers[0]


def _stacks(shapes: Mapping[str, Shape]) -> dict[str, tuple[str, ...]]:
    """{"h.{layer}.fc": ("h.0.fc", "h.1.fc")}: names that differ in one number, which counts from 0, alike in shape."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in shapes:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                found[".".join([*parts[:i], LAYER, *parts[i + 1 :]])][int(part)] = name
    return {
        template: tuple(names[i] for i in range(len(names)))
        for template, names in found.items()
        if sorted(names) == list(range(len(names))) and len({shapes[name] for name in names.values()}) == 1
    }


def _images(features: int, channels: set[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (channels, height, width) of images that flatten to `features`, the squarest first."""
    for n in sorted(channels):
        pixels = features // n if features % n == 0 else 0
        heights = [height for height in range(1, pixels + 1) if pixels % height == 0 and pixels > 1]
        yield from ((n, h, pixels // h) for h in sorted(heights, key=lambda h: (max(h, pixels // h), h)))


def _of_heads(theirs: Shape, ours: Shape) -> list[Layout]:
    """Layouts of an attention projection whose heads have a separate axis in JAX."""
    match theirs, ours:
        case (n,), (heads, size) if n == heads * size:
            return [bias_to_heads(heads, size)]
        case (n, n_in), (same, heads, size) if (n, n_in) == (heads * size, same):
            return [linear_to_heads(heads, size)]
        case (n_out, n), (heads, size, same) if (n_out, n) == (same, heads * size):
            return [linear_from_heads(heads, size)]
    return []


def _ties(model: torch.nn.Module) -> dict[str, str]:
    """{alias: name} of the parameters with several names."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: own for name, p in every if (own := first.setdefault(id(p), name)) != name}


def _table(choice: Choice, tied: Mapping[str, str]) -> NameTable:
    return NameTable({path: TorchParam(unit.name, layout) for path, (unit, layout) in sorted(choice.items())}, tied)


def _used(table: NameTable, like: Any) -> list[str]:
    """Names of the tensors that fill the leaves."""
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves(like)}
    return [
        param.name.replace(LAYER, str(i))
        for path, param in table.params.items()
        for i in range(shapes.get(path, (0,))[0] if LAYER in param.name else 1)
    ]


def _jittered(model: torch.nn.Module) -> torch.nn.Module:
    """Perturb the initial values: scales of one and biases of zero prove nothing."""
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if x.is_floating_point():
                x += torch.from_numpy(_random(f"jitter {name}", tuple(x.shape)))
    return model


def _unlike(torch_name: str, path: str) -> float:
    """Dissimilarity of the words of two names, 0 to 1; numbers are an order, not words."""
    ours, theirs = ([WORDS.get(w, w) for w in re.split(r"[./]", name)] for name in (path, torch_name))
    ends = ours[-1] != theirs[-1]
    text, other = (re.sub(r"[^a-z]+", " ", " ".join(words).lower()).strip() for words in (ours, theirs))
    return (ends + 1 - SequenceMatcher(None, text, other).ratio()) / 2


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64 if np.issubdtype(x.dtype, np.floating) else None)
