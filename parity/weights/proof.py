"""The proof that the tensors of two models correspond."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, leaves
from parity.case import Case
from parity.record import Tensors
from parity.sides.jax_side import from_torch
from parity.sides.torch_side import seeded_model, with_counterpart
from parity.weights.probe import (
    MAX_DISTANCE,
    NEGLIGIBLE_CHANGE,
    perturbed,
    probe_of,
    random_weights,
    relative_distance,
)
from parity.weights.proposal import with_tables
from parity.weights.tied import tied_names


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
    given = case
    case = with_tables(case)
    table, buffers = case.tables
    params_used = _used(table, case.params_like)
    buffers_used = [] if buffers is None else _used(buffers, case.state_like)
    with seeded_model(case, 0) as model:
        tied_in_torch = tied_names(model)
        n_tensors = len(dict(model.named_parameters(remove_duplicate=False)))
        weights = random_weights(model, {*params_used, *buffers_used})
        used = with_counterpart(case, model, weights).keys()
    ties = {**tied_in_torch, **table.tied}
    shared = set(tied_in_torch.values())

    def to_jax(weights: Tensors) -> tuple[Any, Any]:
        return from_torch(case, {name: x for name, x in weights.items() if name in used})

    named = params_used if given.names is None else _used(given.names, given.params_like)
    twice = sorted(name for name, times in Counter([*named, *buffers_used]).items() if times > 1 and name not in shared)
    try:
        params, state = to_jax(weights)
    except UserError as error:
        raise UserError("; ".join([str(error), *(f"used twice {name}" for name in twice)])) from None
    if twice:
        raise UserError(f"the tensors do not fit the model: {'; '.join(f'used twice {name}' for name in twice)}")

    distances: dict[str, float] = {}
    unproven = []
    with probe_of(case) as probe:
        theirs, ours = probe.torch_loss(weights), probe.jax_loss(params, state)
        if not relative_distance(ours, theirs, theirs) <= MAX_DISTANCE:
            raise UserError(
                f"the models of {case.name} differ at the same weights, in losses {theirs:.9g} and {ours:.9g}: "
                "make them agree before proving their weights"
            )
        for name in params_used:
            changed = {**weights, name: perturbed(weights[name], name)}
            changed |= {alias: changed[name] for alias, of in ties.items() if of == name and alias in weights}
            changes = probe.jax_loss(*to_jax(changed)) - ours, probe.torch_loss(changed) - theirs
            if max(map(abs, changes)) <= NEGLIGIBLE_CHANGE * abs(theirs):
                unproven.append(name)
            else:
                distances[name] = relative_distance(*changes, theirs)
    wrong = [f"{name} ({apart:.1e} apart)" for name, apart in distances.items() if not apart <= MAX_DISTANCE]
    if wrong:
        raise UserError(f"perturbed alone, these change the losses of {case.name} differently: {', '.join(wrong)}")
    n_leaves = len([*leaves(case.params_like), *leaves(case.state_like or {})])
    tied = {alias: name for alias, name in ties.items() if alias in weights}
    return Proof(n_tensors, len(buffers_used), n_leaves, tied, distances, tuple(unproven))


def _used(table: NameTable, like: Any) -> list[str]:
    """Names of the tensors that fill the leaves."""
    counts = {path: next(iter(leaf.shape), 0) for path, leaf in leaves(like)}
    return [name for path, param in table.params.items() for name in param.names(counts.get(path, 0))]
