"""Where the tensors come from that a program reads and does not make."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from jaxtrain.port.calls import Call, Value
from jaxtrain.port.recording import Backward, Leaf
from jaxtrain.port.refused import refused_at


@dataclass(frozen=True, eq=False)
class Inputs:
    """Where the roots of a program come from.

    Attributes:
      owned: Parameters and buffers of the script's modules, by name.
      batch: Tensors of a batch, by the name of the script's variable.
      leaves: Places of these in the batch, by the same name.
      constants: The others, whose values never change.
      kept: What the program makes for a later one, which has it in place of an input: by the name of that.
      sizes: Sizes of these.
      lead: Number of calls with which the program begins if it follows an update; 0 if it always begins alike.
      changes: Names of the parameters and buffers that these change.
    """

    owned: Mapping[Value, str]
    batch: Mapping[Value, str]
    leaves: Mapping[str, Leaf]
    constants: Mapping[Value, torch.Tensor]
    kept: Mapping[str, Value] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lead: int = 0
    changes: tuple[str, ...] = ()

    def batch_of(self, backward: Backward) -> dict[str, torch.Tensor]:
        """Return the tensors with which a program was recorded, by name."""
        found = {name: backward.tensors[value].detach() for value, name in self.batch.items()}
        if self.lead:
            found[AFTER_UPDATE] = torch.tensor(backward.is_led)
        if not self.carried:
            return found
        if backward.is_carried:
            found |= {name: torch.zeros_like(found[name]) for name in self.carried}
        return {**found, CARRIED: torch.tensor(backward.is_carried)}

    @property
    def carried(self) -> list[str]:
        """The names of `batch` that have what an update before has kept."""
        names = {*self.batch.values()}
        return [name for name in self.kept if name in names]


CARRIED = "is_carried"
"""The input that says whether what an update keeps is read by the next one, or given to it anew."""

AFTER_UPDATE = "is_after_update"
"""The input that says whether what follows an update is computed first, as the weights of a teacher."""


def of_batches(backward: Backward, modules: Mapping[str, torch.nn.Module], names: dict[Leaf, str]) -> Inputs:
    """Return the inputs of a program that begins with batches of DataLoaders.

    Args:
      backward: The program.
      modules: The script's modules, by name.
      names: Names of the tensors of a batch; new ones are added.
    """
    owned = owned_values(backward, modules)
    leaves = {value: leaf for value, leaf in backward.leaves.items() if value in backward.program.roots}
    for value, leaf in leaves.items():
        if leaf not in names:
            name = leaf.key if isinstance(leaf.key, str) else backward.names.get(value) or f"batch_{leaf.key or 0}"
            names[leaf] = free(name if name.isidentifier() and name != "self" else "batch", {*names.values()})
    batch = {value: names[leaf] for value, leaf in leaves.items()}
    others = [x for x in backward.program.roots if x not in owned and x not in batch]
    if any(x not in backward.tensors for x in others):
        what = "what the model computed before the last call of backward is read"
        raise refused_at(what, backward.line, "compute it after that call")
    rest = {x: backward.tensors[x] for x in others}
    return Inputs(owned, batch, {names[leaf]: leaf for leaf in leaves.values()}, rest)


def owned_values(backward: Backward, modules: Mapping[str, torch.nn.Module]) -> dict[Value, str]:
    """Return the names of the parameters and buffers of modules that a program reads itself."""
    by_id = _own(modules)
    known = backward.interval.identities
    return {value: by_id[known[value]] for value in backward.program.roots if known.get(value) in by_id}


def changed(backward: Backward, calls: Iterable[Call], modules: Mapping[str, torch.nn.Module]) -> tuple[str, ...]:
    """Return the names of the parameters and buffers of modules that calls change in place.

    Args:
      backward: A program.
      calls: Calls of it.
      modules: The script's modules, by name.
    """
    interval = backward.interval
    places = {interval.memory[value] for call in calls for value in call.writes}
    values = {key: value for value, key in interval.identities.items()}
    own = _own(modules)
    return tuple(name for key, name in own.items() if key in values and interval.memory[values[key]] in places)


def _own(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Return the names of parameters and buffers, by identity."""
    return {
        id(x): f"{name}.{path}"
        for name, part in modules.items()
        for path, x in (*part.named_parameters(), *part.named_buffers())
    }


def free(name: str, taken: Collection[str]) -> str:
    """Return a name, with a number if it is taken."""
    return name if name not in taken else next(x for i in range(2, 10**6) if (x := f"{name}_{i}") not in taken)
