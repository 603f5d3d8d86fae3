"""Where a PyTorch model and its JAX version differ, with no annotation of either.

Both are trained for a few steps in float64 from the same weights on the same batches, dropout's masks shared, and
every intermediate value of both is recorded with the line it was computed at. Values are matched by their numbers
alone. The frameworks group their operations differently, so some values have no counterpart although nothing is wrong;
but then what is computed from them has one again. A difference persists: from it on nothing has a counterpart, down to
the loss or the new parameters. The first such value is the answer, in PyTorch's program and in JAX's.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from parity.case import Case
from parity.divergence import Divergence

if TYPE_CHECKING:
    from parity.fingerprint import Sources, Trace
    from parity.jax_trace import End, Equation
    from parity.torch_trace import Operation, Output

LOSS = ("loss", "")
ORDER = {"loss": 0, "raw gradient": 1, "gradient": 2, "state": 3, "parameter": 4, "buffer": 5}
"""What a step leaves behind, from what goes wrong first; the optimizer's state goes by PyTorch's own names."""
STEPS = 2
"""Training steps compared: what a momentum or a running average does shows in the second."""


def locate(case: Case, *, seed: int = 0, steps: int = STEPS) -> Divergence | None:
    """Where `case` first differs within some training steps; None where nothing does.

    Raises `UserError` where the name table, or one model's dropout, does not fit the other's.

    >>> from parity.cases import CASES
    >>> cubic = CASES["autograd.cubic"]()
    >>> locate(cubic)
    >>> def wrong(params, batch, rng):
    ...     return cubic.loss_fn({"x": 1.1 * params["x"]}, batch, rng)
    >>> locate(replace(cubic, loss_fn=wrong)).torch
    'loss: aten.pow'
    """
    # Imported when something is run, as in `parity.run`.
    from parity import torch_side
    from parity.fingerprint import counterparts
    from parity.jax_trace import jax_trace
    from parity.randomness import dropout_masks
    from parity.torch_trace import torch_trace
    from parity.weights import with_tables

    case = with_tables(case)
    masks = dropout_masks(case, "fp64", accumulate=1, steps=steps, seed=seed)
    ours, our_ends = jax_trace(case, torch_side.initial_weights(case, seed), steps=steps, seed=seed)
    theirs, their_ends = torch_trace(case, steps=steps, seed=seed, masks=masks)
    same = {i: equal for i, equal in enumerate(counterparts(theirs, ours)) if equal}
    matching = _Matching(theirs, ours, same)
    ends = enumerate(zip(their_ends, our_ends, strict=True), start=1)
    return next((found for step, (their, our) in ends if (found := matching.first(step, their, our))), None)


@dataclass(frozen=True)
class _Matching:
    """Both programs' values; `same`: by the index of one of PyTorch's, those of JAX's that are equal to it."""

    theirs: "Trace[Operation]"
    ours: "Trace[Equation]"
    same: "Mapping[int, Sources]"

    @cached_property
    def right(self) -> "Collection[int]":
        """Those of PyTorch's values that are no difference."""
        from parity.fingerprint import sound

        operations = enumerate(value.where for value in self.theirs.values)
        forward = {i for i, where in operations if where is not None and where.stage == "forward"}
        return sound(self.theirs, self.same, forward)

    def first(self, step: int, their: "Mapping[Output, Sources]", our: "End") -> Divergence | None:
        """The first difference that reaches what the step leaves behind."""
        from parity.fingerprint import differing

        loss = their[LOSS]
        if any(i in self.same and not self.same[i] & our.loss for i in loss):
            # Equal to something else: a mean that was taken for the sum is.
            rest = {i: equal for i, equal in self.same.items() if i not in loss}
            return replace(self, same=rest).first(step, their, our)
        wrong = {output: sources for output, sources in their.items() if differing(self.theirs, self.right, sources)}
        if not wrong:
            return None
        at = self._start(wrong)
        operation, sources = self.theirs.values[at].where, self.theirs.values[at].sources
        last = self.theirs.values[max(sources)].where
        assert operation is not None
        equation = self._equation(our, our.loss if LOSS in wrong else our.state, sources)
        return Divergence(
            stage="buffers" if {kind for kind, _ in wrong} == {"buffer"} else operation.stage,
            step=step,
            torch=str(operation),
            torch_source=operation.line(),
            jax_source="" if equation is None else equation.line(),
            last_match="its inputs" if last is None else str(last),
            parameters=() if LOSS in wrong else _in_order(wrong, "raw gradient"),
            torch_at=operation.source,
            jax_at=None if equation is None else equation.source,
        )

    def _start(self, wrong: "Mapping[Output, Sources]") -> int:
        """The first difference on the way to the earliest of the wrong outputs: from there on all the rest is wrong."""
        from parity.fingerprint import differing, edge

        kind = min((kind for kind, _ in wrong), key=lambda kind: ORDER.get(kind, ORDER["state"]))
        outputs = [sources for (what, _), sources in wrong.items() if what == kind]
        if kind != "parameter":
            return min(differing(self.theirs, self.right, _union(outputs)))
        # Of one parameter, the last: optimizers group decay and update differently, and of these terms, which have
        # nothing after them that could match, the decay comes first.
        return max(edge(self.theirs, differing(self.theirs, self.right, outputs[0])))

    def _equation(self, our: "End", outputs: "Sources", their_sources: "Sources") -> "Equation | None":
        """Of the equations that differ from all of PyTorch's and are computed from what agrees, the first: best one
        computed from the very values that PyTorch's operation was.
        """
        from parity.fingerprint import differing, edge, sound

        right = sound(self.ours, _union(self.same.values()), our.forward)
        starts = sorted(edge(self.ours, differing(self.ours, right, outputs)))
        given = _union(self.same.get(i, frozenset()) for i in their_sources)
        fed_alike = [i for i in starts if self.ours.values[i].sources & given]
        at = next(iter([*fed_alike, *starts, *sorted(given, reverse=True)]), None)
        return None if at is None else self.ours.values[at].where


def _in_order(wrong: "Mapping[Output, Sources]", kind: str) -> tuple[str, ...]:
    return tuple(sorted((name for k, name in wrong if k == kind), key=lambda name: max(wrong[kind, name])))


def _union(sources: "Iterable[Sources]") -> "Sources":
    return frozenset().union(*sources)
