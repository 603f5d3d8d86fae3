"""What names say about which tensor a leaf is.

Three things count, the strongest first. Modules that both sides name alike are not exchanged: where PyTorch and JAX
both have `gate_proj` and `up_proj`, a port that uses one for the other has a bug, however equal the two functions are
after an exchange. Numbered modules keep their order. Similar words decide what is left.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

KINDS = {"weight": "kernel", "scale": "kernel", "embedding": "kernel", "gamma": "kernel", "beta": "bias"}
KINDS |= {"running_mean": "mean", "running_var": "var", "num_batches_tracked": "count"}
KINDS |= {kind: kind for kind in set(KINDS.values())}
"""Last parts of names that say what a tensor is in its module, and their common word."""
CONTRADICTED = 3.0
"""Price of an assignment that contradicts names that both sides share; more than any difference of values."""
DOUBTED = 0.3
"""Price of an assignment that contradicts the order of modules that are not named alike, or one shared name."""
UNLIKE = 0.05
"""Price of names without a common word."""
SEPARATED = 0.1
"""Price of a tensor whose siblings, the tensors of its module, are assigned to leaves of other modules."""


@dataclass(frozen=True)
class Name:
    """A name of a tensor or a path of a leaf.

    Attributes:
      text: The name.
      parent: The path of its module.
      words: The names of the modules and of the tensor in lower case, without numbers and punctuation.
      own: The module's own name; "" if it has none but numbers.
      kind: What the tensor is in its module, in a common word; "" if the name does not say.
      template: The name with "{}" in place of numbers.
      container: The word before its first number, without a plural's "s"; "" without numbers.
    """

    text: str
    parent: str
    words: str
    own: str
    kind: str
    template: str
    container: str

    @staticmethod
    def read(text: str) -> "Name":
        """Read a name of parts separated by "." or "/"."""
        parts = re.split(r"[./]", text)
        kind = KINDS.get(parts[-1], "")
        modules = parts[:-1] if kind else parts
        words = [word for part in modules if (word := re.sub(r"[^a-z0-9]", "", part.lower())) and not word.isdigit()]
        template = re.sub(r"\d+|\{layer\}", "{}", text)
        container = re.search(r"([a-z]+)[^a-zA-Z{]*\{\}", template.lower())
        return Name(
            text,
            parent=re.sub(r"[./]?[^./]*$", "", text),
            words=" ".join([*words, kind]),
            own=words[-1] if words else "",
            kind=kind,
            template=template,
            container=container[1].rstrip("s") if container else "",
        )


KEYS: Sequence[Callable[[Name], str]] = (lambda name: name.own, lambda name: name.kind, lambda name: name.words)
"""What both sides may name alike: a module, what a tensor is in its module, and the whole path."""


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def name_prices(
    units: Sequence[Name], leaves: Sequence[Name], fits: np.ndarray, lookalikes: Sequence[str]
) -> np.ndarray:
    """Return what names say against each assignment.

    Args:
      units: Names of the tensors.
      leaves: Paths of the leaves.
      fits: Whether a tensor fits a leaf [units, leaves].
      lookalikes: For each tensor a key that is equal for those that could be mistaken for each other.

    Returns:
      The prices [units, leaves], 0 where nothing speaks against it.
    """
    prices = np.zeros(fits.shape)
    for group in _grouped(range(len(units)), lookalikes).values():
        columns = [j for j in range(len(leaves)) if fits[group, j].any()]
        theirs, ours = [units[i] for i in group], [leaves[j] for j in columns]
        shared = [({key(x) for x in theirs} & {key(x) for x in ours}) - {""} for key in KEYS]
        their_rank, our_rank = _ranks(units, group), _ranks(leaves, columns)
        for i in group:
            for j in columns:
                prices[i, j] = (
                    _crossed_names(units[i], leaves[j], shared)
                    + _crossed_order(units[i], leaves[j], their_rank[i], our_rank[j])
                    + UNLIKE * _unlike(units[i], leaves[j])
                    + 0.3 * UNLIKE * abs(i / len(units) - j / len(leaves))
                )
    return prices


def _crossed_names(unit: Name, leaf: Name, shared: Sequence[Set[str]]) -> float:
    """The price of a pair that differs in a name that both sides share."""
    crossed = [
        (key(unit) in both) + (key(leaf) in both)
        for key, both in zip(KEYS, shared, strict=True)
        if key(unit) != key(leaf)
    ]
    return (0.0, DOUBTED, CONTRADICTED)[max(crossed, default=0)]


def _crossed_order(unit: Name, leaf: Name, their_rank: tuple[int, int], our_rank: tuple[int, int]) -> float:
    (i, of), (j, many) = their_rank, our_rank
    if of != many or of == 1 or i == j:
        return 0.0
    return CONTRADICTED if unit.container and unit.container == leaf.container else DOUBTED


def _ranks(names: Sequence[Name], members: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return {member: (place among the names that differ from it in numbers only, how many they are)}."""
    ranks: dict[int, tuple[int, int]] = {}
    for alike in _grouped(members, [name.template for name in names]).values():
        ordered = sorted(alike, key=lambda i: natural(names[i].text))
        ranks |= {member: (place, len(ordered)) for place, member in enumerate(ordered)}
    return ranks


def _grouped(members: Iterable[int], keys: Sequence[str]) -> Mapping[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for i in members:
        groups[keys[i]].append(i)
    return groups


def _unlike(unit: Name, leaf: Name) -> float:
    """Dissimilarity of the words of two names, 0 to 1; numbers are an order, not words."""
    ours, theirs = (
        re.sub(r"[^a-z]+", " ", name.text.lower().removesuffix(re.split(r"[./]", name.text)[-1].lower()) + name.kind)
        for name in (leaf, unit)
    )
    return ((unit.kind != leaf.kind) + 1 - SequenceMatcher(None, ours.strip(), theirs.strip()).ratio()) / 2


def sibling_prices(units: Sequence[Name], leaves: Sequence[Name], chosen: Mapping[int, int]) -> np.ndarray:
    """Return the price of separating tensors of a module, given an assignment {unit: leaf}.

    Returns:
      The prices [units, leaves]: 0 where the other tensors of the unit's module are in the leaf's module.
    """
    prices = np.zeros((len(units), len(leaves)))
    for modules in _grouped(range(len(units)), [name.parent for name in units]).values():
        for i in modules:
            parents = [leaves[chosen[k]].parent for k in modules if k != i and k in chosen]
            for j, leaf in enumerate(leaves):
                prices[i, j] = SEPARATED * np.mean([parent != leaf.parent for parent in parents]) if parents else 0.0
    return prices
