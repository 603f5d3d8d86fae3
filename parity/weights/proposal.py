"""The proposal of name tables: the cheapest assignment of tensors to leaves, tried under random weights."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any

import jax
import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam, leaves
from parity.case import Case
from parity.cases.validity import check_case
from parity.sides.jax_side import from_torch
from parity.sides.torch_side import model_of, with_counterpart
from parity.weights.assignment import Choice, Costs, Match, Side, no_costs
from parity.weights.by_values import by_values
from parity.weights.classes import by_class
from parity.weights.layouts import OWNERS, Convolution
from parity.weights.probe import MAX_DISTANCE, Probe, probe_of, random_weights, relative_distance
from parity.weights.tied import tie_leaves, tied_names, untied, ways_to_untie
from parity.weights.unused import constant_buffers, unused_parameters, without_tensors

LISTED = 5
"""Number of entries that a message lists."""


@dataclass(frozen=True)
class Proposal:
    """Proposed tables.

    Attributes:
      names: Table of the parameters.
      buffers: Table of the buffers; None for a model without state.
      notes: Lines on choices that are not proved.
    """

    names: NameTable
    buffers: NameTable | None
    notes: tuple[str, ...] = ()


def with_tables(case: Case) -> Case:
    """Return the case with the name tables that it leaves out.

    Args:
      case: A case, with or without `names` and `buffers`.

    Returns:
      The same case if it has all its tables, else a copy with the missing ones proposed (`proposal_of`). In both,
      parameters of PyTorch that its loss does not depend on and that no leaf stands for are left out, and leaves that
      one tensor fills are one parameter.

    Raises:
      UserError: Some tensors or leaves have no counterpart, or the counterpart of some is in doubt.
    """
    return completed(case)[0]


def completed(case: Case) -> tuple[Case, tuple[str, ...]]:
    """Return the case of `with_tables`, and notes on what it proposes, ties and leaves out."""
    case, notes = proposed(case)
    case, tied = tie_leaves(case, tied_names(model_of(case)))
    return case, (*notes, *tied)


def proposed(case: Case) -> tuple[Case, tuple[str, ...]]:
    """Return the case with all its tables, and notes on them; leaves that it matches are not tied yet.

    Raises:
      UserError: Something in the case is wrong (`parity.cases.validity`), or as in `with_tables`.
    """
    check_case(case)
    model = model_of(case)
    left_out = _left_out(case, model)
    notes = [f"{name} is left out: {_why(model, name)}" for name in sorted(left_out)[:LISTED]]
    if left_out:
        case = without_tensors(case, left_out)
    if case.names is not None:
        case, tied = tie_leaves(case, tied_names(model))
        notes += tied
    if not case.has_tables:
        proposal = proposal_of(case)
        case = replace(case, names=proposal.names, buffers=proposal.buffers)
        notes += proposal.notes
    return case, tuple(notes)


def _why(model: torch.nn.Module, name: str) -> str:
    if name in dict(model.named_buffers()):
        return "PyTorch's loss does not change it, and it has no leaf"
    trained = model.get_parameter(name).requires_grad
    return "PyTorch's loss does not depend on it" if trained else "it is frozen in PyTorch and has no leaf"


def _left_out(case: Case, model: torch.nn.Module) -> set[str]:
    """PyTorch's tensors without a leaf: parameters that are frozen or not in its loss, and buffers that it does not
    change."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    if case.names is not None:
        lacking = _not_named(case, model)
        unused = unused_parameters(case) if lacking else set()
        return (unused | frozen) & lacking | _spare_buffers(case, model)
    if _fits(model, case) or _untyings(case, model):
        return set()
    for names in _unions(unused_parameters(case), frozen, _spare_buffers(case, model)):
        without = without_tensors(case, names)
        smaller = model_of(without)
        if _fits(smaller, case) or _untyings(without, smaller):
            return names
    return set()  # the faults of the whole model say more than those without some of its tensors


def _not_named(case: Case, model: torch.nn.Module) -> set[str]:
    """The parameters that the table does not name; none if it does not fit the leaves."""
    if {path for path, _ in leaves(case.params_like)} != set(case.names.params):
        return set()
    aliases = tied_names(model)
    named = {aliases.get(name, name) for name in case.names.torch_order(case.params_like)}
    return {name for name, _ in model.named_parameters()} - named - case.names.tied.keys()


def _spare_buffers(case: Case, model: torch.nn.Module) -> set[str]:
    """The buffers that the loss does not change, if there are more buffers than leaves of the JAX model's state."""
    if case.state_like is None or case.buffers is not None:
        return set()
    counted = [name for name in model.state_dict() if name in dict(model.named_buffers())]
    counted = [name for name in counted if not name.endswith("num_batches_tracked")]
    leaves_of_state = [leaf for leaf in jax.tree.leaves(case.state_like) if np.ndim(leaf) > 0]
    return constant_buffers(case) & {*counted} if len(counted) > len(leaves_of_state) else set()


def _unions(*sets: set[str]) -> list[set[str]]:
    """The unions of some of these sets, the smallest first."""
    some = [s for s in sets if s]
    return sorted((set().union(*chosen) for n in range(1, len(some) + 1) for chosen in combinations(some, n)), key=len)


def _untyings(case: Case, model: torch.nn.Module) -> list[Case]:
    """The case with as few tied parameters untied as its leaves need, in every way that leaves nothing over."""
    for _, ways in groupby(ways_to_untie(model), key=len):
        versions = [untied(case, groups) for groups in ways]
        if fitting := [version for version in versions if _fits(model_of(version), case)]:
            return fitting
    return []


def _fits(model: torch.nn.Module, case: Case) -> bool:
    """Whether every tensor of a model has a leaf of its shape, and every leaf a tensor."""
    try:
        _sides(model, case.params_like, case.state_like, ())
    except UserError:
        return False
    return True


def proposal_of(case: Case) -> Proposal:
    """Propose the tables of a case, and compare the losses of both models under random weights.

    Args:
      case: A case; tables that it has are kept.

    Returns:
      The tables, with notes on choices that are arbitrary or not proved.

    Raises:
      UserError: Some tensors or leaves have no counterpart; or the losses differ, and neither values nor names tell
        which tensor some leaves are, or which of several names of a tied one.
    """
    model = model_of(case)
    if case.names is not None or _fits(model, case):
        return _proposal_of(case)
    versions = _untyings(case, model)
    if len(versions) < 2:
        return _proposal_of(*versions or [case])
    for version in versions:
        with suppress(UserError):
            found = _proposal_of(version)
            if _agrees(version, found):
                return found
    tied = ", ".join(dict.fromkeys([*tied_names(model).values(), *tied_names(model)]))
    raise UserError(
        f"the losses of {case.name} differ under random weights, and which leaf is which of the tied {tied} is in "
        "doubt: pass names, a NameTable"
    )


def _agrees(case: Case, proposal: Proposal) -> bool:
    """Whether both losses are equal under random weights."""
    whole = replace(case, names=proposal.names, buffers=proposal.buffers)
    model = model_of(case)
    weights = random_weights(model, model.state_dict().keys())
    arguments = from_torch(whole, with_counterpart(whole, model, weights))
    with probe_of(case) as probe:
        theirs, ours = probe.torch_loss(weights), probe.jax_loss(*arguments)
    return relative_distance(ours, theirs, theirs) <= MAX_DISTANCE


def _proposal_of(case: Case) -> Proposal:
    with probe_of(case) as probe:
        return _probed(case, model_of(case), probe)


def _probed(case: Case, model: torch.nn.Module, probe: Probe) -> Proposal:
    of_images = _sides(model, case.params_like, case.state_like, _image_channels(model))
    if not any(side.ambiguous for side in of_images):
        return _proposal(model, case, [side.assigned(no_costs) for side in of_images])
    options = [of_images]
    if any(side.flattened for side in of_images):
        options.insert(0, _sides(model, case.params_like, case.state_like, ()))
    tried: list[tuple[_Tried, Costs, list[Side]]] = []
    for sides in options:
        costs = by_values(model, sides, probe)
        found = _try(model, case, probe, [side.assigned(costs) for side in sides])
        if found.agrees:
            return replace(found.proposal, notes=tuple(_interchangeable(found.choices)))
        tried.append((found, costs, sides))
    best, costs_of_best, sides = min(tried, key=lambda one: one[0].cost)
    exchanged = _try(model, case, probe, [side.assigned(costs, trust_names=False) for side in of_images])
    if exchanged.agrees:
        return replace(best.proposal, notes=tuple(_exchanged(best.choices, exchanged.choices)))
    _refuse_draws(case, probe)
    alike = by_class(costs_of_best, list(zip(sides, best.choices, strict=True)))
    best = _try(model, case, probe, [side.assigned(alike) for side in sides])
    _refuse_doubts(case, best)
    losses = f"{best.torch_loss:.9g} in PyTorch and {best.jax_loss:.9g} in JAX"
    return replace(best.proposal, notes=(f"names were proposed; the losses differ under random weights: {losses}",))


def propose(torch_model: torch.nn.Module, params_like: Any) -> NameTable:
    """Propose the table from JAX's parameters to PyTorch's by shapes, names and order alone.

    Args:
      torch_model: The PyTorch model.
      params_like: Pytree with the shapes of the JAX parameters.

    Returns:
      The table.

    Raises:
      UserError: Some tensors or leaves have no counterpart; the message lists all of them.

    Example:
      >>> import numpy as np
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
    (side,) = _sides(torch_model, params_like, None, _image_channels(torch_model))
    return _table(side.assigned(no_costs), tied_names(torch_model))


def as_source(table: NameTable) -> str:
    """Return the table as Python source, in names of `jaxtrain.interop`."""
    params = [f'        "{path}": TorchParam("{p.name}", {p.layout.source}),' for path, p in table.params.items()]
    tied = ", ".join(f'"{alias}": "{name}"' for alias, name in table.tied.items())
    return "\n".join(["NameTable(", "    {", *params, "    },", f"    tied={{{tied}}},", ")"])


def _sides(model: torch.nn.Module, params_like: Any, state_like: Any, channels: Iterable[int]) -> list[Side]:
    """The parameters, and the buffers if the JAX model has a state. Raises `UserError` for what is left over."""
    ties = tied_names(model)
    params = {name: tuple(p.shape) for name, p in model.named_parameters()}
    # If the JAX model has no state, PyTorch's buffers have no counterpart: a causal mask, for instance.
    buffers = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in {**params, **ties}}
    if not any(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(state_like)):
        buffers = {name: shape for name, shape in buffers.items() if not name.endswith("num_batches_tracked")}
    owners = {f"{name}.weight": kind for name, m in model.named_modules() for kind in OWNERS if isinstance(m, kind)}
    sides = [Side(params, params_like, owners, set(channels))]
    if state_like is not None:
        sides.append(Side(buffers, state_like, {}, set()))
    if faults := [fault for side in sides for fault in side.faults(buffers)]:
        # A count of batches, which the modules of flax and equinox do not have.
        counts = {name for name in buffers if name.endswith("num_batches_tracked")}
        if state_like is not None and counts:
            others = {name: shape for name, shape in buffers.items() if name not in counts}
            sides[1] = Side(others, state_like, {}, set())
            if not any(side.faults(buffers) for side in sides):
                return sides
        raise UserError(
            f"the tensors do not correspond: {'; '.join(faults)}: add them to a NameTable, names or buffers; a buffer "
            "that buffers does not list is left out"
        )
    return sides


def _image_channels(model: torch.nn.Module) -> set[int]:
    """Numbers of channels of the images that a linear layer may flatten."""
    return {m.out_channels for m in model.modules() if isinstance(m, Convolution)}


@dataclass(frozen=True)
class _Tried:
    """A proposal, and the losses of both models with it under random weights."""

    proposal: Proposal
    choices: Sequence[Choice]
    torch_loss: float
    jax_loss: float

    @property
    def agrees(self) -> bool:
        return relative_distance(self.jax_loss, self.torch_loss, self.torch_loss) <= MAX_DISTANCE

    @property
    def cost(self) -> float:
        """What values say against it."""
        return sum(match.cost for choice in self.choices for match in choice.values())


def _try(model: torch.nn.Module, case: Case, probe: Probe, choices: Sequence[Choice]) -> _Tried:
    proposal = _proposal(model, case, choices)
    whole = replace(case, names=proposal.names, buffers=proposal.buffers)
    used = [name for choice in choices for match in choice.values() for name in match.unit.tensors]
    weights = random_weights(model, used)
    arguments = from_torch(whole, with_counterpart(whole, model, weights))
    return _Tried(proposal, choices, probe.torch_loss(weights), probe.jax_loss(*arguments))


def _proposal(model: torch.nn.Module, case: Case, choices: Sequence[Choice]) -> Proposal:
    names = case.names or _table(choices[0], tied_names(model))
    return Proposal(names, case.buffers or (_table(choices[1], {}) if case.state_like is not None else None))


def _table(choice: Choice, tied: Mapping[str, str]) -> NameTable:
    return NameTable({path: TorchParam(m.unit.name, m.layout) for path, m in sorted(choice.items())}, tied)


def _matches(choices: Sequence[Choice]) -> list[tuple[str, Match]]:
    return [(path, match) for choice in choices for path, match in choice.items()]


def _interchangeable(choices: Sequence[Choice]) -> list[str]:
    groups = {frozenset((match.unit.name, *match.rivals)) for _, match in _matches(choices) if match.rivals}
    return [
        f"{' and '.join(sorted(group))} are interchangeable in the loss: which leaf is which was chosen by order"
        for group in sorted(groups, key=sorted)[:LISTED]
    ]


def _exchanged(ours: Sequence[Choice], agreed: Sequence[Choice]) -> list[str]:
    other = dict(_matches(agreed))
    lines = [
        f"{path} is {match.unit.name} by its name, but the losses agree under random weights only if it is "
        f"{other[path].unit.name}"
        for path, match in _matches(ours)
        if match.unit != other[path].unit
    ]
    return lines[:LISTED]


def _refuse_draws(case: Case, probe: Probe) -> None:
    if probe.jax_draws():
        raise UserError(
            f"the loss_fn of {case.name} draws random numbers although rng is None, as in evaluation, so that its "
            "weights cannot be matched by values: turn dropout off where rng is None, or pass names, a NameTable"
        )


def _refuse_doubts(case: Case, tried: _Tried) -> None:
    doubts = [(path, match) for path, match in _matches(tried.choices) if match.rivals]
    if not doubts:
        return
    listed = "; ".join(f"{path} may be {' or '.join([m.unit.name, *m.rivals[:2]])}" for path, m in doubts[:LISTED])
    more = f"; and {len(doubts) - LISTED} more" if len(doubts) > LISTED else ""
    raise UserError(
        f"the losses of {case.name} differ under random weights ({tried.torch_loss:.9g} in PyTorch, "
        f"{tried.jax_loss:.9g} in JAX), and some names are in doubt: {listed}{more}: pass names, a NameTable"
    )
