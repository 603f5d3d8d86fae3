"""The proposal of name tables: the cheapest assignment of tensors to leaves."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from parity.case import Case
from parity.torch_side import seeded_model
from parity.weights.assignment import OWNERS, Choice, Side, by_names
from parity.weights.by_values import by_values
from parity.weights.probe import Probe, probe_of
from parity.weights.tied import tied_names


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
    return _propose(torch_model, params_like, None, probe)[0]


def as_source(table: NameTable) -> str:
    """Return the table as Python source, in names of `jaxtrain.interop`."""
    params = [f'        "{path}": TorchParam("{p.name}", {p.layout.source}),' for path, p in table.params.items()]
    tied = ", ".join(f'"{alias}": "{name}"' for alias, name in table.tied.items())
    return "\n".join(["NameTable(", "    {", *params, "    },", f"    tied={{{tied}}},", ")"])


def _propose(
    model: torch.nn.Module,
    params_like: Any,
    state_like: Any,
    probe: Probe | None,
    given: tuple[NameTable | None, NameTable | None] = (None, None),
) -> tuple[NameTable, NameTable | None]:
    ties = tied_names(model)
    params = {name: tuple(p.shape) for name, p in model.named_parameters()}
    # If the JAX model has no state, PyTorch's buffers have no counterpart: a causal mask, for instance.
    buffers = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in {**params, **ties}}
    owners = {f"{name}.weight": kind for name, m in model.named_modules() for kind in OWNERS if isinstance(m, kind)}
    channels = {shape[0] for shape in params.values() if len(shape) > 2}
    sides = [Side(params, params_like, owners, channels)]
    if state_like is not None:
        sides.append(Side(buffers, state_like, {}, set()))
    faults = [fault for side in sides for fault in side.faults()]
    if faults:
        raise UserError(f"the tensors do not correspond: {'; '.join(faults)}: add them to a NameTable")
    costs = by_names if probe is None or not any(side.ambiguous() for side in sides) else by_values(model, sides, probe)
    chosen = [side.assigned(costs) for side in sides]
    table = given[0] or _table(chosen[0], {alias: name for alias, name in ties.items() if alias not in buffers})
    return table, (given[1] or _table(chosen[1], {})) if state_like is not None else None


def _table(choice: Choice, tied: Mapping[str, str]) -> NameTable:
    return NameTable({path: TorchParam(unit.name, layout) for path, (unit, layout) in sorted(choice.items())}, tied)
