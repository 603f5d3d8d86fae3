"""The gradient of a window whose micro-batches pass through a pipeline of stages.

A stage is a part of the layers that the loss_fn scans over; what precedes the scan belongs to the first stage, and what
follows it to all of them (`head.py`). All stages run the same program, and select what they need of it. Each
adds up its gradients, weighted as those of a window without a pipeline; those of parameters outside of the layers are
added over stages after the last micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.labs.pipeline.head import DividedHead, Head, in_places, join, split
from jaxtrain.labs.pipeline.layered_function import LayeredFunction
from jaxtrain.labs.pipeline.pipeline_stages import Stages
from jaxtrain.labs.pipeline.residuals import StoredResiduals
from jaxtrain.step.accumulate import gradient_factor, nonzero_weight, sum_dtype
from jaxtrain.step.nonfinite import Nonfinite, first_nonfinite
from jaxtrain.step.objective import Loss
from jaxtrain.step.update.float32_arithmetic import widen

Results = tuple[Loss, dict[str, Loss]]
Compute = Callable[..., Results]
"""`compute(variables, fixed, micro_batch, rng) -> (Loss, metrics)`."""


class Divided(NamedTuple):
    """A loss computation whose rows are divided over the stages too.

    Attributes:
      compute: The loss computation.
      variables: Zeros [groups · p, …] that stand for the partial sums of the parameters to differentiate by.
      fixed: All parameters.
    """

    compute: Compute
    variables: Any
    fixed: Any


class PipelinedWindow(NamedTuple):
    """The gradient and the results of a window.

    Attributes:
      grads: Gradient of the window's mean loss by `variables`, multiplied by the loss scale.
      loss: Summed loss and weight.
      metrics: Summed metrics.
      nonfinite: Location of the first inf or NaN of the micro-batches' gradients.
    """

    grads: Any
    loss: Loss
    metrics: dict[str, Loss]
    nonfinite: Nonfinite


def pipelined_window(
    compute: Compute,
    variables: Any,
    fixed: Any,
    micro_batches: Any,
    keys: jax.Array,
    scale: Any,
    stages: Stages,
    divided: Divided | None = None,
) -> PipelinedWindow:
    """Differentiate the mean loss of a window in a pipeline.

    Args:
      compute: The loss computation.
      variables: Pytree of parameters to differentiate by.
      fixed: Pytree of other parameters.
      micro_batches: The window, [k, B, …].
      keys: The dropout keys of the micro-batches, [k].
      scale: The loss scale.
      stages: The stages.
      divided: The same loss computation, as the stages divide what follows the layers; None if each computes all of it.

    Raises:
      UserError: The loss has no scan over layers, or their number or that of the micro-batches is not divisible.
    """
    return _Pipeline(compute, variables, fixed, micro_batches, keys, scale, stages, divided).run()


class _State(NamedTuple):
    """What passes from tick to tick. Arrays have an axis of p stages.

    Attributes:
      arrived: Inputs of every stage, [p, …], from the one before: the floating-point ones, and the others.
      gradient: Gradients by the outputs of every stage, [p, …], from the next one.
      residuals: Residuals of the last forward ticks, [slots, p, …].
      of_stacks: Gradient sums of the layers, [V, p, layers / (V·p), …].
      of_leaves: Gradient sums of each stage by the variables used outside of the layers, [p, …].
      results: Results of every micro-batch, [k].
      finite: Whether the gradients of a micro-batch were finite in a stage, bool[p, k, stacks and leaves].
    """

    arrived: tuple[list[Any], list[Any]]
    gradient: list[Any]
    residuals: list[Any]
    of_stacks: list[Any]
    of_leaves: list[Any]
    results: Results
    finite: jax.Array


class _Pipeline:
    def __init__(
        self,
        compute: Compute,
        variables: Any,
        fixed: Any,
        micro_batches: Any,
        keys: jax.Array,
        scale: Any,
        stages: Stages,
        divided: Divided | None,
    ) -> None:
        self._leaves, self._structure = jax.tree.flatten(variables)
        self._fixed = jax.tree.leaves(fixed)
        self._n, self._window, self._keys = len(self._leaves), micro_batches, keys
        self._stages, self._k = stages, keys.shape[0]
        self._schedule = stages.schedule(self._k)

        self._params = [*self._leaves, *self._fixed]
        inputs = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], x), (micro_batches, keys))
        self._layered = _layered(compute, variables, fixed, inputs)
        n_virtual = stages.size * stages.chunks
        if self._layered.layers % n_virtual:
            raise UserError(
                f"{self._layered.layers} layers are not divisible by the {n_virtual} stages of pipeline={stages.size}"
                + f" with pipeline_chunks {stages.chunks}" * (stages.chunks > 1)
                + ": use a size that divides them"
            )
        self._layers_of_stage = self._layered.layers // n_virtual
        self._stacks = [stages.split(x) for x in self._layered.stacks(self._params)]
        self._is_variable = [any(i < self._n for i in of) for of in self._layered.leaves_of_stacks()]
        self._before = [i for i in range(self._n) if self._layered.used_before[i]]
        window = micro_batches, keys
        if divided is None:
            self._head = Head(self._layered, self._params, self._n, window, scale, stages)
        else:
            params = jax.tree.leaves((divided.variables, divided.fixed))
            sums = [x.shape for x in self._leaves]
            self._head = DividedHead(sums, _layered(*divided, inputs), params, self._n, window, scale, stages)
        self._outside = sorted({*self._before, *self._head.used})
        self._trace(inputs)

    def _trace(self, inputs: Any) -> None:
        """Trace a stage forward and backward."""
        shapes = [jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in self._stacks]
        carry, ys = self._layered.outputs()
        passed = [*carry, *ys]
        self._n_carry = len(carry)
        self._is_float = [jnp.issubdtype(x.dtype, np.inexact) for x in passed]
        self._passed = split(passed, self._is_float)
        diff, held = self._diff_and_held(shapes)
        number = jax.ShapeDtypeStruct((), np.int32)
        others = self._passed[1], inputs, number
        make = partial(StoredResiduals, self._run_stage, diff, self._passed[0], held, others)
        self._stage = self._stages.trace(make)

    def _diff_and_held(self, stacks: Sequence[Any]) -> tuple[Any, Any]:
        """Return the parameters of a stage that it is differentiated by, and the others."""
        variables, others = split(stacks, self._is_variable)
        return (variables, [self._leaves[i] for i in self._before]), (others, self._fixed)

    def _run_stage(self, diff: Any, passed: list[Any], held: Any, inputs: Any) -> Any:
        """Run the layers of a virtual stage on what the one before has passed."""
        (variables, leaves), (others, fixed), (rest, inputs, number) = diff, held, inputs
        params = [*in_places(self._n, self._before, leaves), *fixed]
        consts, first, per_layer = self._layered.before(params, inputs)
        values = join(passed, rest, self._is_float)
        carry, ys = values[: self._n_carry], values[self._n_carry :]
        carry = [jnp.where(number == 0, own, given) for own, given in zip(first, carry, strict=True)]
        start, size = number * self._layers_of_stage, self._layers_of_stage
        per_layer = [lax.dynamic_slice_in_dim(x, start, size) for x in per_layer]
        carry, own = self._layered.apply(consts, carry, join(variables, others, self._is_variable), per_layer)
        ys = [lax.dynamic_update_slice_in_dim(y, new, start, 0) for y, new in zip(ys, own, strict=True)]
        return split([*carry, *ys], self._is_float)

    def run(self) -> PipelinedWindow:
        schedule, p = self._schedule, self._stages.size
        state, t = self._empty(), schedule.delay
        forward = partial(self._tick, forward=True, head=False, backward=False)
        both = partial(self._tick, forward=True, head=False, backward=True)
        last = partial(self._tick, forward=True, head=True, backward=True)
        backward = partial(self._tick, forward=False, head=False, backward=True)
        state = self._ticks(forward, state, 0, t)
        if schedule.chunks == 1:
            state = self._ticks(last, state, t, self._k)
        else:
            # The last stage ends p micro-batches, and then runs its other chunks.
            state = self._ticks(last, state, t, p)
            length = schedule.chunks * p

            def turn(state: _State, start: Any) -> tuple[_State, None]:
                state = self._ticks(both, state, start, length - p)
                return self._ticks(last, state, start + length - p, p), None

            starts = t + p + length * jnp.arange(self._k // p - 1, dtype=np.int32)
            state, _ = lax.scan(turn, state, starts)
        state = self._ticks(backward, state, schedule.ticks - t, t)
        return self._close(state)

    @staticmethod
    def _ticks(tick: Callable[..., _State], state: _State, start: Any, length: int) -> _State:
        numbers = start + jnp.arange(length, dtype=np.int32)
        state, _ = lax.scan(lambda state, t: (tick(state, t), None), state, numbers)
        return state

    def _empty(self) -> _State:
        p, stages = self._stages.size, self._stages
        dtype = sum_dtype(self._leaves)

        def zeros(x: Any, *leading: int, as_sum: bool = False) -> jax.Array:
            return stages.zeros((*leading, *x.shape), dtype if as_sum else x.dtype, len(leading) - 1)

        stacks, _ = split(self._stacks, self._is_variable)
        outside = [self._leaves[i] for i in self._outside]
        return _State(
            arrived=tuple([zeros(x, p) for x in part] for part in self._passed),  # type: ignore[arg-type]
            gradient=[zeros(x, p) for x in self._passed[0]],
            residuals=[zeros(_as_data(x), self._schedule.slots, p) for x in self._stage.residuals],
            of_stacks=[stages.zeros(x.shape, dtype, 1) for x in stacks],
            of_leaves=[zeros(x, p, as_sum=True) for x in outside],
            results=jax.tree.map(lambda x: jnp.zeros((self._k, *x.shape), x.dtype), self._head.results_shapes()),
            finite=jnp.ones((p, self._k, len(stacks) + len(outside)), bool),
        )

    def _tick(self, state: _State, t: Any, *, forward: bool, head: bool, backward: bool) -> _State:
        gradient = [jnp.zeros_like(x) for x in state.gradient]
        if forward:
            unit = self._schedule.forward(t, np.arange(self._stages.size, dtype=np.int32))
            passed, rest, state = self._forward(state, t, unit)
            if head:
                gradient, state = self._differentiate_head(state, unit, passed, rest)
            shift = partial(self._stages.shift, by=1)
            state = state._replace(arrived=(list(map(shift, passed)), list(map(shift, rest))))
        return self._backward(state, t, gradient) if backward else state

    def _inputs(self, micro_batch: Any) -> Any:
        window = jax.tree.map(lambda x: self._stages.pick_shared(x, micro_batch), self._window)
        return window, self._keys[micro_batch]

    def _chunk(self, chunk: Any) -> list[Any]:
        """Return the parameters of a chunk of every stage, [p, layers / (V·p), …]."""
        return [self._pick(x, chunk) for x in self._stacks]

    def _pick(self, x: jax.Array, chunk: Any) -> jax.Array:
        return x[0] if self._stages.chunks == 1 else self._stages.pick(x, chunk)

    def _forward(self, state: _State, t: Any, unit: Any) -> tuple[list[Any], list[Any], _State]:
        diff, held = self._diff_and_held(self._chunk(unit.chunk))
        number = unit.chunk * self._stages.size + np.arange(self._stages.size, dtype=np.int32)
        passed, rest = state.arrived
        run = self._stages.map(self._stage.forward, in_axes=((0, None), 0, (0, None), 0))
        passed, rest, residuals = run(diff, passed, held, (rest, self._inputs(unit.micro_batch), number))
        slot = t % self._schedule.slots
        kept = [
            lax.dynamic_update_index_in_dim(all_slots, _data(new), slot, 0)
            for all_slots, new in zip(state.residuals, residuals, strict=True)
        ]
        return passed, rest, state._replace(residuals=kept)

    def _differentiate_head(self, state: _State, unit: Any, passed: Any, rest: Any) -> tuple[list[Any], _State]:
        """Differentiate the loss of the micro-batch that the last stage has ended."""
        found, i = self._head.differentiate(passed, rest, unit.micro_batch), unit.micro_batch[-1]
        results = jax.tree.map(lambda all_of, x: all_of.at[i].set(x), state.results, found.results)
        of_all = jnp.broadcast_to(i, unit.micro_batch.shape)
        return found.of_passed, self._add(state._replace(results=results), of_all, found.valid, None, found.of_leaves)

    def _backward(self, state: _State, t: Any, of_head: list[Any]) -> _State:
        schedule, stages = self._schedule, np.arange(self._stages.size, dtype=np.int32)
        unit = schedule.backward(t, stages)
        ends = (stages == self._stages.size - 1) & (unit.chunk == self._stages.chunks - 1)
        gradient = [
            _where(unit.valid, _where(ends, own, given), jnp.zeros_like(own))
            for own, given in zip(of_head, state.gradient, strict=True)
        ]
        slot = schedule.forward_tick(unit, stages) % schedule.slots
        kept = zip(state.residuals, self._stage.residuals, strict=True)
        residuals = [self._from_data(self._stages.pick(x, slot), like) for x, like in kept]
        diff, held = self._diff_and_held(self._chunk(unit.chunk))
        run = self._stages.map(self._stage.backward, in_axes=((0, None), (0, None), 0, 0))
        (of_stacks, of_leaves), of_passed = run(diff, held, residuals, gradient)
        by_leaf = dict(zip(self._before, of_leaves, strict=True))
        state = self._add(state, unit.micro_batch, unit.valid, (unit.chunk, of_stacks), by_leaf)
        sent = [_where(unit.valid, x, jnp.zeros_like(x)) for x in of_passed]
        return state._replace(gradient=[self._stages.shift(x, -1) for x in sent])

    def _add(self, state: _State, micro_batch: Any, valid: Any, of_stacks: Any, of_leaves: Mapping[int, Any]) -> _State:
        """Add the gradients of a micro-batch in each stage to the sums, where they are valid.

        Args:
          state: The state.
          micro_batch: The micro-batch of each stage.
          valid: Whether the gradients of a stage are to be added.
          of_stacks: The chunk of each stage, and the gradients of its layers; None for none.
          of_leaves: Gradients by the position of the variable.
        """
        factor = gradient_factor(state.results[0].weight[micro_batch], self._k)
        chunk, stacks = (None, []) if of_stacks is None else (of_stacks[0], widen(of_stacks[1]))
        leaves = {i: widen(x) for i, x in of_leaves.items()}
        all_finite = jnp.ones(self._stages.size, bool)
        finite = [_finite(x) for x in stacks] if stacks else [all_finite] * len(state.of_stacks)
        finite += [_finite(leaves[i]) if i in leaves else all_finite for i in self._outside]
        wrong = valid[:, None] & ~jnp.stack(finite, 1)
        is_this = lax.broadcasted_iota(np.int32, (self._stages.size, self._k), 1) == micro_batch[:, None]
        state = state._replace(finite=state.finite & ~(is_this[:, :, None] & wrong[:, None, :]))

        def weighted(x: jax.Array, dtype: Any) -> jax.Array:
            x = x * _along(factor.astype(x.dtype), x)
            return _where(valid, x, jnp.zeros_like(x)).astype(dtype)

        sums = zip(self._outside, state.of_leaves, strict=True)
        of_all = [a + weighted(leaves[i], a.dtype) if i in leaves else a for i, a in sums]
        of_layers = zip(state.of_stacks, stacks, strict=True) if stacks else []
        layers = [self._add_to_chunk(a, chunk, weighted(x, a.dtype)) for a, x in of_layers]
        return state._replace(of_leaves=of_all, of_stacks=layers or state.of_stacks)

    def _add_to_chunk(self, sums: jax.Array, chunk: Any, values: jax.Array) -> jax.Array:
        return sums + values[None] if self._stages.chunks == 1 else self._stages.add(sums, chunk, values)

    def _close(self, state: _State) -> PipelinedWindow:
        loss, metrics = jax.tree.map(lambda x: x.sum(0), state.results)
        of_stacks = iter(self._stages.join(x) for x in state.of_stacks)
        whole = [next(of_stacks) if is_variable else None for is_variable in self._is_variable]
        grads = self._layered.pull_back_stacks(self._params, whole)[: self._n]
        for i, x in zip(self._outside, state.of_leaves, strict=True):
            grads[i] = grads[i] + x.sum(0)
        weight = nonzero_weight(loss.weight)
        grads = [g / weight.astype(g.dtype) for g in grads]
        return PipelinedWindow(jax.tree.unflatten(self._structure, grads), loss, metrics, self._nonfinite(state.finite))

    def _from_data(self, x: jax.Array, like: Any) -> jax.Array:
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(self._keys)) if _is_key(like) else x

    def _nonfinite(self, finite: jax.Array) -> Nonfinite:
        """Locate the first inf or NaN by micro-batch, and then by leaf."""
        of = [leaves for leaves, one in zip(self._layered.leaves_of_stacks(), self._is_variable, strict=True) if one]
        sources = [*of, *([i] for i in self._outside)]
        by_leaf = [[j for j, leaves in enumerate(sources) if i in leaves] for i in range(self._n)]
        by_stage = finite.all(0)
        return first_nonfinite(jnp.stack([by_stage[:, columns].all(1) for columns in map(np.array, by_leaf)], 1))


def _layered(compute: Compute, variables: Any, fixed: Any, inputs: Any) -> LayeredFunction:
    """Split a loss computation, of the list of all its parameters, at its scan over layers."""
    params, structure = jax.tree.flatten((variables, fixed))
    return LayeredFunction(
        lambda params, inputs: compute(*jax.tree.unflatten(structure, params), *inputs), params, inputs
    )


def _finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all(tuple(range(1, x.ndim)))


def _along(of_stages: Any, x: jax.Array) -> Any:
    return of_stages.reshape(-1, *[1] * (x.ndim - 1))


def _where(condition: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(_along(condition, x), x, y)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_data(x: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x
