"""What follows the layers of a pipeline, the head: the loss of a micro-batch from the last stage, and its gradient.

The stages divide its rows, if they can: the program is then one of all devices, which the last stage sends its output
and which return the gradient by it. The gradients of parameters remain sums of each stage. Otherwise every stage
computes the whole head, of which that of the last one is used.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.labs.pipeline.layered_function import LayeredFunction
from jaxtrain.labs.pipeline.pipeline_stages import Stages
from jaxtrain.step.accumulate import nonzero_weight


class HeadGradient(NamedTuple):
    """The results and the gradients of a micro-batch's head.

    Attributes:
      results: The loss and the metrics.
      of_leaves: Gradients by the position of the variable, [p, …].
      of_passed: Gradients by what the stages pass, [p, …]: the last one's is used.
      valid: Whether the gradients by variables of each stage are to be added, bool[p].
    """

    results: Any
    of_leaves: Mapping[int, jax.Array]
    of_passed: list[jax.Array]
    valid: Any


class Head:
    """The head, as every stage computes it.

    Args:
      layered: The loss computation, split at its scan over layers.
      params: Its parameters: the variables, then the fixed ones.
      n: The number of variables.
      window: The micro-batches of the window and their dropout keys, [k, …].
      scale: The loss scale.
      stages: The stages.

    Attributes:
      used: The positions of the variables that it uses.
    """

    def __init__(
        self, layered: LayeredFunction, params: Sequence[Any], n: int, window: Any, scale: Any, stages: Stages
    ) -> None:
        self._layered, self._fixed, self._window, self._scale = layered, params[n:], window, scale
        self._stages, self._n = stages, n
        self.used = [i for i in range(n) if layered.used_after[i]]
        self._leaves = [params[i] for i in self.used]
        carry, ys = layered.outputs()
        self._n_carry, shapes = len(carry), [*carry, *ys]
        self._is_float = [jnp.issubdtype(x.dtype, np.inexact) for x in shapes]
        self._shapes = split(shapes, self._is_float)

    def results_shapes(self) -> Any:
        """Return the shapes of the loss and the metrics of a micro-batch."""
        inputs = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], x), self._window)
        return jax.eval_shape(self._run, self._leaves, self._shapes[0], self._shapes[1], inputs)[1]

    def differentiate(self, passed: list[Any], rest: list[Any], micro_batch: Any) -> HeadGradient:
        """Differentiate the loss of the micro-batch that the last stage has ended.

        Args:
          passed: Floating-point outputs of every stage, [p, …].
          rest: The others.
          micro_batch: The micro-batch of each stage, int32[p].
        """
        window, keys = self._window
        inputs = jax.tree.map(lambda x: self._stages.pick_shared(x, micro_batch), window), keys[micro_batch]
        run = jax.grad(self._run, argnums=(0, 1), has_aux=True)
        mapped = self._stages.map(run, in_axes=(None, 0, 0, 0))
        (of_leaves, of_passed), results = mapped(self._leaves, passed, rest, inputs)
        results = jax.tree.map(self._stages.last, results)
        is_last = np.arange(self._stages.size) == self._stages.size - 1
        return HeadGradient(results, dict(zip(self.used, of_leaves, strict=True)), of_passed, is_last)

    def _run(self, leaves: list[Any], passed: list[Any], rest: list[Any], inputs: Any) -> Any:
        """Compute the loss from what the last virtual stage passes, as a window without a pipeline scales it."""
        values = join(passed, rest, self._is_float)
        carry, ys = values[: self._n_carry], values[self._n_carry :]
        params = [*in_places(self._n, self.used, leaves), *self._fixed]
        loss, metrics = self._layered.after(params, inputs, carry, ys)
        _, keys = self._window
        mean = loss.total / (nonzero_weight(loss.weight) * jnp.asarray(len(keys), loss.weight.dtype))
        return mean * jnp.asarray(self._scale, mean.dtype), (loss, metrics)


class DividedHead(Head):
    """The head, of which every stage computes its part of the rows.

    The variables are zeros [groups · p, …], one for each part of the rows.

    Args:
      sums: Shapes of the gradient sums of a stage, [groups, …], by the position of the variable; without the axis of
        groups where the rows have one group.
      *args: As for `Head`.
    """

    def __init__(self, sums: Sequence[tuple[int, ...]], *args: Any) -> None:
        super().__init__(*args)
        self._sums = sums

    def differentiate(self, passed: list[Any], rest: list[Any], micro_batch: Any) -> HeadGradient:
        """As `Head.differentiate`."""
        inputs = jax.tree.map(lambda x: x[micro_batch[-1]], self._window)
        axes = self._row_axes({x.shape[0] for x in jax.tree.leaves(inputs[0])})
        of_last = [
            [self._stages.divide(x, axis) for x, axis in zip(values, part, strict=True)]
            for values, part in zip((passed, rest), axes, strict=True)
        ]
        run = jax.grad(self._run, argnums=(0, 1), has_aux=True)
        (of_leaves, of_passed), results = run(self._leaves, *of_last, inputs)
        sums = {i: self._by_stage(x, self._sums[i]) for i, x in zip(self.used, of_leaves, strict=True)}
        collected = [self._stages.collect(x, axis) for x, axis in zip(of_passed, axes[0], strict=True)]
        return HeadGradient(results, sums, collected, np.ones(self._stages.size, bool))

    def _row_axes(self, rows: set[int]) -> tuple[list[Any], list[Any]]:
        """Return the axis of rows of every value that the stages pass; None for those without."""
        # Outputs of the layers are [layers, B, …].
        expected = split([0] * self._n_carry + [1] * (len(self._is_float) - self._n_carry), self._is_float)
        of_floats, of_others = (
            [axis if {*x.shape[axis : axis + 1]} == rows else None for axis, x in zip(axes, shapes, strict=True)]
            for axes, shapes in zip(expected, self._shapes, strict=True)
        )
        return of_floats, of_others

    def _by_stage(self, sums: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Split sums of all parts of the rows, [groups · p, …], to those of every stage."""
        by_stage = jnp.moveaxis(sums.reshape(-1, self._stages.size, *sums.shape[1:]), 1, 0)
        return by_stage.reshape(self._stages.size, *shape)


def split(values: Sequence[Any], of: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the values at the positions where `of` is true, and the others."""
    of_values = [*zip(values, of, strict=True)]
    return [x for x, one in of_values if one], [x for x, one in of_values if not one]


def join(first: Sequence[Any], second: Sequence[Any], of: Sequence[bool]) -> list[Any]:
    """Return the values that `split` has split."""
    parts = iter(first), iter(second)
    return [next(parts[0] if one else parts[1]) for one in of]


def in_places(n: int, positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return a list of n elements with these values at these positions, and None at the others."""
    by_position = dict(zip(positions, values, strict=True))
    return [by_position.get(i) for i in range(n)]
