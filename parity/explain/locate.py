"""Locate the first operation in which a PyTorch model and its JAX version differ, without annotations.

Both train for a few steps in float64 from the same weights, on the same batches and with the same dropout masks. Every
intermediate value of both is recorded with the line that computed it, and values are matched by their numbers alone.
The frameworks group operations differently, so a correct value may have no counterpart, but what is computed from it
has one again. A real difference persists: from there on no value has a counterpart, down to the loss or the new
parameters. The first such value is the answer, in PyTorch's program and in JAX's. Where it is computed from values that
have the same elements in another order (`parity.compare.order`), the first of these is.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from parity.case import Case
from parity.compare.fingerprint import (
    CONSTANT_TOLERANCE,
    TOLERANCE,
    ancestors,
    apart,
    approximations,
    constants_behind,
    correct,
    counterparts,
    differing,
    edge,
    nearest,
)
from parity.divergence import Divergence
from parity.explain.coincidence import ROUNDING, by_chance
from parity.explain.reordered import in_order
from parity.source import built_line

if TYPE_CHECKING:
    from parity.compare.fingerprint import Sources, Trace
    from parity.explain.jax_trace import End, Equation
    from parity.explain.torch_trace import Operation, Output, Results

LOSS = ("loss", "")
ORDER = {"loss": 0, "raw gradient": 1, "gradient": 2, "state": 3, "parameter": 4, "buffer": 5}
"""The results of a step, in the order in which they go wrong; "state" is the optimizer's, by PyTorch's names."""
STEPS = 2
"""Number of training steps compared: momentum and running averages show in the second."""
COARSE = 1e-6
"""Relative tolerance that shows a fault larger than constants rounded to float32 and their consequences."""
FINEST = 1e-12
"""Tolerance of the forward pass where a difference has grown from one below `TOLERANCE`."""
NEAR = 1e-3
"""Relative distance up to which a wrong value is recognized as that of the same operation."""
ATTENUATED = 10
"""Factor by which a difference is larger where it arises than where it is found, if operations attenuate it."""
GROWTH = 1e3
"""Factor by which an operation at fault differs more than the values it is computed from."""


def locate(case: Case, *, seed: int = 0, steps: int = STEPS) -> Divergence | None:
    """Return the first difference of a case.

    Args:
      case: The case.
      seed: Seed of weights, data and dropout.
      steps: Number of training steps.

    Returns:
      Where the programs first differ; None if they do not.

    Raises:
      UserError: The name table, or the dropout of one model, does not fit the other model.

    >>> from parity.cases import CASES
    >>> cubic = CASES["autograd.cubic"]()
    >>> locate(cubic)
    >>> def wrong(params, batch, rng):
    ...     return cubic.loss_fn({"x": 1.1 * params["x"]}, batch, rng)
    >>> locate(replace(cubic, loss_fn=wrong)).torch
    'loss: aten.pow'
    """
    # Imported here, as in `parity.run`.
    from parity.explain.jax_trace import jax_trace
    from parity.explain.torch_trace import torch_trace
    from parity.sides import torch_side
    from parity.sides.randomness import dropout_masks
    from parity.weights import with_tables

    case = with_tables(case)
    masks = dropout_masks(case, "fp64", accumulate=1, steps=steps, seed=seed)
    ours, our_ends = jax_trace(case, torch_side.initial_weights(case, seed), steps=steps, seed=seed)
    theirs, their_ends = torch_trace(case, steps=steps, seed=seed, masks=masks)
    return first_difference(theirs, ours, their_ends, our_ends)


def first_difference(
    theirs: "Trace[Operation]", ours: "Trace[Equation]", their_ends: "Sequence[Results]", our_ends: "Sequence[End]"
) -> Divergence | None:
    """Return the first difference of two programs.

    Args:
      theirs: The values of PyTorch's.
      ours: The values of JAX's.
      their_ends: The results of PyTorch's steps.
      our_ends: The results of JAX's.

    Returns:
      Where the programs first differ; None if they do not.
    """
    return _Programs(theirs, ours, list(zip(their_ends, our_ends, strict=True))).first()


@dataclass(frozen=True)
class _Programs:
    """The values of both programs and the results of their steps."""

    theirs: "Trace[Operation]"
    ours: "Trace[Equation]"
    ends: "Sequence[tuple[Results, End]]"

    def first(self) -> Divergence | None:
        """The first difference of the values, or of their order where that makes them wrong."""
        found = self._first_value()
        if found is None or found.at.stage != "forward":
            return None if found is None else found.at
        return found.matching.in_order().first(found.step, *self.ends[found.step - 1]) or found.at

    def _first_value(self) -> "_Found | None":
        """The first difference; a larger one that is not its consequence is preferred."""
        found = self._first_within()
        return found if found is None else self._before_attenuation(found) or found

    def _first_within(self) -> "_Found | None":
        found = self._first(TOLERANCE, COARSE) or self._first(TOLERANCE)
        if found is None:
            return None
        if self._distance(found.at.position) <= COARSE:
            larger = self._first(COARSE, COARSE)
            if larger is not None and larger.at.stage in ("forward", "backward") and self._begins(larger.at):
                return larger
            found = self._first(TOLERANCE) or found
        return found if self._begins(found.at) else self._grown() or found

    @cached_property
    def forward(self) -> set[int]:
        """Indices of PyTorch's values in the forward pass."""
        operations = enumerate(value.where for value in self.theirs.values)
        return {i for i, where in operations if where is not None and where.stage == "forward"}

    def _first(self, tolerance: float, of_constants: float = CONSTANT_TOLERANCE) -> "_Found | None":
        steps = enumerate(self.ends, start=1)
        matching = self._matching(tolerance, of_constants)
        found = ((step, matching.first(step, their, our)) for step, (their, our) in steps)
        return next((_Found(at, matching, step) for step, at in found if at), None)

    def _matching(self, tolerance: float, of_constants: float) -> "_Matching":
        equal = enumerate(counterparts(self.theirs, self.ours, tolerance, of_constants))
        same = {i: indices for i, indices in equal if indices}
        return _Matching(self.theirs, self.ours, self.forward, same, {}, (tolerance, of_constants)).without(
            by_chance(self.theirs, self.ours, same, self.forward)
        )

    def _grown(self) -> "_Found | None":
        """The first difference of the forward pass below `TOLERANCE`, whether or not the loss shows it."""
        matching, (their, our) = self._matching(FINEST, CONSTANT_TOLERANCE), self.ends[0]
        loss = {LOSS: their.sources[LOSS]}
        found = matching.without(loss[LOSS]).first(1, their._replace(sources=loss), our)
        if found is None or found.stage != "forward":
            return None
        after = differing(self.theirs, matching.without(loss[LOSS]).right, loss[LOSS])
        # Of a value that PyTorch computes otherwise, JAX has no approximation.
        grown = any(FINEST < self._distance(i) <= TOLERANCE for i in after)
        return _Found(found, matching, 1) if grown else None

    def _before_attenuation(self, found: "_Found") -> "_Found | None":
        """The first difference beyond rounding, if it is larger than the one found after it.

        Equality within `TOLERANCE` hides it where the values computed from it hardly depend on it, as those of a norm
        hardly depend on the scale of its input.
        """
        exact = self._first(ROUNDING) if self._distance(found.at.position) <= NEAR else None
        if exact is None or exact.at.stage != "forward" or not exact.at.position < found.at.position:
            return None
        arises = ATTENUATED * self._distance(found.at.position) <= self._distance(exact.at.position) <= NEAR
        return exact if arises and self._begins(exact.at) else None

    def _begins(self, found: Divergence) -> bool:
        """Whether the values that PyTorch's operation is computed from differ much less than its result."""
        values = self.theirs.values
        distances = (self._distance(i) for i in values[found.position].sources if values[i].trained)
        before = max((x for x in distances if x <= COARSE), default=0.0)
        return before * GROWTH <= self._distance(found.position)

    def _distance(self, i: int) -> float:
        return nearest(self.theirs.values[i], self.ours)


@dataclass(frozen=True)
class _Found:
    """The first difference of a training step."""

    at: Divergence
    matching: "_Matching"
    step: int


@dataclass(frozen=True)
class _Matching:
    """The values of both programs; `same` maps the index of a value of PyTorch's to those of JAX's equal to it.

    Values whose counterparts have another order are `reordered` in PyTorch's program and `our_reordered` in JAX's.
    """

    theirs: "Trace[Operation]"
    ours: "Trace[Equation]"
    forward: "Collection[int]"
    same: "Mapping[int, Sources]"
    elsewhere: "Mapping[int, Sources]"
    tolerances: tuple[float, float]
    reordered: "Sources" = frozenset()
    our_reordered: "Sources" = frozenset()

    @cached_property
    def right(self) -> "Collection[int]":
        """Indices of PyTorch's values that agree with JAX."""
        return correct(self.theirs, self.same, self.forward) - _constants(self.theirs, self.reordered)

    def in_order(self) -> "_Matching":
        """The same without the counterparts in another order."""
        same = in_order(self.theirs, self.ours, self.same, *self.tolerances)
        reordered = frozenset(self.same.keys() - same.keys())
        ours = _union(self.same.values()) - _union(same.values())
        ordered = replace(self, theirs=self.theirs.in_order(), ours=self.ours.in_order())
        return replace(ordered, same=same, reordered=reordered, our_reordered=ours)

    def without(self, values: "Collection[int]") -> "_Matching":
        """The same without the counterparts of some values."""
        return replace(self, same={i: equal for i, equal in self.same.items() if i not in values})

    def first(self, step: int, their: "Results", our: "End") -> Divergence | None:
        """The first difference that reaches a result of the step."""
        loss = their.sources[LOSS]
        if any(i in self.same and not self.same[i] & our.loss for i in loss):
            # The loss equals another value of JAX's, as a mean does that is used in place of the sum.
            return self.without(loss).first(step, their, our)
        if elsewhere := self._gradients_elsewhere(their, our):
            return replace(self.without(elsewhere), elsewhere=elsewhere).first(step, their, our)
        wrong = {
            output: sources for output, sources in their.sources.items() if differing(self.theirs, self.right, sources)
        }
        if not wrong:
            return None
        at = self._start(wrong)
        sources = frozenset(i for i in self.theirs.values[at].sources if self.theirs.values[i].trained)
        last = self.theirs.values[max(self.theirs.computed(sources))].where
        ours = self._equations(our, our.loss if LOSS in wrong else our.state, at, sources)
        operation = self.theirs.values[at].where
        equation = self.ours.values[ours[0]].where if ours else None
        assert operation is not None
        if operation.stage == "forward" and ours:
            constant, theirs = self._constants(at, our, ours)
            operation = operation if theirs is None else self.theirs.values[theirs].where
            equation = equation if constant is None else self.ours.values[constant].where
        assert operation is not None
        if operation.stage == "backward" and (equation is None or equation.in_step or at in self.elsewhere):
            equation = self._only_use(at, their, our) or self._differentiated(operation) or equation
        equation = self._only_user(at, our, ours) or equation
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
            position=at,
            torch_built=operation.built,
            jax_built="" if equation is None or equation.source is None else built_line(*equation.source),
        )

    def _gradients_elsewhere(self, their: "Results", our: "End") -> "dict[int, Sources]":
        """PyTorch's gradients of parameters that JAX computes, but not as the gradient of the parameter."""
        of = {name: sources for (kind, name), sources in their.sources.items() if kind == "raw gradient"}
        return {
            i: self.same[i]
            for name, sources in of.items()
            for i in sources
            if len(sources) == 1 and i in self.same and i not in self.forward
            if apart(their.gradients[name], our.gradients[name], COARSE)
        }

    def _only_use(self, at: int, their: "Results", our: "End") -> "Equation | None":
        """JAX's equation that uses the parameter whose gradient the value `at` is, if there is only one line."""
        of = [name for (kind, name), sources in their.sources.items() if kind == "raw gradient" and sources == {at}]
        given = _union(our.parameters.get(name, frozenset()) for name in of)
        made = (self.ours.values[i] for i in our.forward)
        users = [value.where for value in made if value.where is not None and not given.isdisjoint(value.sources)]
        users += [where for i in given for where in self.ours.lost.get(i, ())]
        lines = {where.source: where for where in users if not where.in_step}
        return next(iter(lines.values())) if len(lines) == 1 else None

    def _only_user(self, at: int, our: "End", equations: Sequence[int]) -> "Equation | None":
        """JAX's only equation that uses what PyTorch's `at` is computed from, where none of `equations` does.

        Its result is correct, but of an earlier value, or does not depend on what it uses: an operation is missing.
        """
        if at in self.elsewhere:
            return self._lost(min(self.elsewhere[at]))
        used = ancestors(self.ours, our.loss)
        fed = self.ours.computed(_union(self.ours.values[i].sources for i in equations))
        for i in sorted(self.theirs.values[at].sources):
            given = min(self.ours.computed(self.same.get(i, ())), default=None)
            if given is None or i not in self.forward or not self.theirs.values[i].trained or given in fed:
                continue
            if given not in used:
                return self._lost(given)
            values = ((j, self.ours.values[j]) for j in our.forward if self.ours.values[j].reordered is None)
            users = [j for j, value in values if given in self.ours.computed(value.sources)]
            return self.ours.values[users[0]].where if len(users) == 1 and {*users} <= {*self._our_right(our)} else None
        return None

    def _lost(self, i: int) -> "Equation | None":
        """The first equation of the model that uses a value for a result that does not depend on it."""
        return next((where for where in self.ours.lost.get(i, ()) if not where.in_step), None)

    def _differentiated(self, operation: "Operation") -> "Equation | None":
        """JAX's equation of the forward pass whose result is that of the operation that `operation` differentiates."""
        alike = (self.theirs.values[i].where for i in self.same)
        of_line = [
            min(equal)
            for where, equal in zip(alike, self.same.values(), strict=True)
            if where == replace(operation, stage="forward", name=where.name if where else "")
        ]
        return self.ours.values[of_line[-1]].where if of_line else None

    def _start(self, wrong: "Mapping[Output, Sources]") -> int:
        """Index of the first difference on the way to the earliest of the wrong outputs."""
        kind = min((kind for kind, _ in wrong), key=lambda kind: ORDER.get(kind, ORDER["state"]))
        outputs = [sources for (what, _), sources in wrong.items() if what == kind]
        if kind != "parameter":
            return min(differing(self.theirs, self.right, _union(outputs)))
        # The last one for a parameter: optimizers group decay and update differently, and the decay, which has nothing
        # after it that could match, comes first.
        return max(edge(self.theirs, differing(self.theirs, self.right, outputs[0])))

    def _equations(self, our: "End", outputs: "Sources", at: int, their_sources: "Sources") -> list[int]:
        """Indices of the equations that differ from all of PyTorch's values and are computed from values that agree.

        Those with the same inputs as PyTorch's operation `at` come first, and before them one with nearly its result.
        """
        starts = sorted(edge(self.ours, differing(self.ours, self._our_right(our), outputs)))
        given = _union(self.same.get(i, frozenset()) for i in their_sources)
        fed_alike = [i for i in starts if self.ours.values[i].sources & given]
        matched = _union(self.same.values()) | self.our_reordered
        near = approximations(self.theirs.values[at], self.ours, NEAR)
        near = [i for i in near if i not in matched and self.ours.values[i].sources & given]
        return [*near[:1], *fed_alike, *starts] or sorted(given, reverse=True)[:1]

    def _constants(self, at: int, our: "End", equations: Sequence[int]) -> tuple[int | None, int | None]:
        """Indices of the constants at fault, (JAX's, PyTorch's), of PyTorch's operation `at` and JAX's equations.

        A constant without a counterpart may just be computed otherwise. JAX's is at fault if its first equation at
        fault uses it, or if PyTorch's operation uses such a constant as well.
        """
        right = self._our_right(our)
        theirs = _first_constant(self.theirs, self.right, [at])
        wrong = differing(self.ours, right, our.loss)
        ours = _first_constant(self.ours, right, equations[:1] if theirs is None else [equations[0], *sorted(wrong)])
        if ours is None and theirs is not None:
            # It may equal a constant of another part of PyTorch's program.
            behind = constants_behind(self.theirs, (), at)
            known = correct(self.ours, _union(self.same.get(i, frozenset()) for i in behind), our.forward)
            ours = _first_constant(self.ours, known, equations[:1])
        return ours, None if ours is None else theirs

    def _our_right(self, our: "End") -> "Collection[int]":
        return correct(self.ours, _union(self.same.values()), our.forward) - _constants(self.ours, self.our_reordered)


def _first_constant(trace: "Trace[Any]", right: "Collection[int]", values: "Iterable[int]") -> int | None:
    """Index of the first constant without a counterpart that the first possible of `values` is computed from.

    One that is computed from constants that agree is preferred.
    """
    for at in values:
        starts = sorted(edge(trace, constants_behind(trace, right, at)))
        derived = [i for i in starts if trace.values[i].sources]
        if starts:
            return [*derived, *starts][0]
    return None


def _constants(trace: "Trace[Any]", values: "Iterable[int]") -> "Sources":
    return frozenset(i for i in values if not trace.values[i].trained)


def _in_order(wrong: "Mapping[Output, Sources]", kind: str) -> tuple[str, ...]:
    return tuple(sorted((name for k, name in wrong if k == kind), key=lambda name: max(wrong[kind, name])))


def _union(sources: "Iterable[Sources]") -> "Sources":
    return frozenset().union(*sources)
