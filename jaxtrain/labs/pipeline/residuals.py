"""A function and its pull-back as two functions, with the residuals between them as arrays to be stored.

Residuals that depend on parameters alone, such as the parameters themselves, are not stored but computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.interpreters import partial_eval

from jaxtrain.program import rewrite


class StoredResiduals:
    """A function `fn(params, x, held, inputs) -> (y, aux)` to be differentiated by `params` and `x`.

    Args:
      fn: The function.
      params: Pytree of parameters, or their shapes.
      x: Pytree of floating-point arrays, or their shapes.
      held: Pytree of parameters without a gradient, or their shapes.
      inputs: Pytree of other arrays, or their shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> def fn(w, x, held, inputs):
      ...     return jnp.sin(x @ w), None
      >>> w, x = jnp.ones((2, 2)), jnp.ones((3, 2))
      >>> gradient = StoredResiduals(fn, w, x, None, None)
      >>> y, _, residuals = gradient.forward(w, x, None, None)
      >>> [r.shape for r in residuals], gradient.backward(w, None, residuals, y)[1].shape
      ([(3, 2), (3, 2)], (3, 2))
    """

    def __init__(self, fn: Callable[..., Any], params: Any, x: Any, held: Any, inputs: Any) -> None:
        structure: Any = None

        def forward(params: Any, held: Any, x: Any, inputs: Any) -> Any:
            nonlocal structure
            y, pull_back, aux = jax.vjp(lambda params, x: fn(params, x, held, inputs), params, x, has_aux=True)
            leaves, structure = jax.tree.flatten(pull_back)
            return (y, aux), leaves

        closed, shapes = rewrite.make_jaxpr(forward, return_shape=True)(params, held, x, inputs)
        self._structure, self._results = structure, jax.tree.structure(shapes[0])
        self._n = n_results = len(jax.tree.leaves(shapes[0]))
        n_params = len(jax.tree.leaves((params, held)))
        residuals = closed.jaxpr.outvars[n_results:]
        self._is_stored = [_depends_beyond(closed, n_results + i, n_params) for i in range(len(residuals))]
        stored = [v for v, is_stored in zip(residuals, self._is_stored, strict=True) if is_stored]
        again = [v for v, is_stored in zip(residuals, self._is_stored, strict=True) if not is_stored]
        # A value that several operations need is stored once.
        unique = list(dict.fromkeys(stored))
        self._stored_as = [unique.index(v) for v in stored]
        self._forward = _evaluator(closed, [*closed.jaxpr.outvars[:n_results], *unique])
        self._again = _evaluator(closed, again)
        self._others = [v.aval for v in closed.jaxpr.invars[n_params:]]
        self.residuals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in unique]

    def forward(self, params: Any, x: Any, held: Any, inputs: Any) -> tuple[Any, Any, list[Any]]:
        """Return y, aux and the residuals to be stored."""
        outs = self._forward(*jax.tree.leaves((params, held, x, inputs)))
        y, aux = jax.tree.unflatten(self._results, outs[: self._n])
        return y, aux, outs[self._n :]

    def backward(self, params: Any, held: Any, residuals: Sequence[Any], gradient: Any) -> tuple[Any, Any]:
        """Return the gradients by `params` and by `x`, from that by y."""
        again = iter(self._again(*jax.tree.leaves((params, held)), *map(_placeholder, self._others)))
        stored = iter(residuals[i] for i in self._stored_as)
        leaves = [next(stored if is_stored else again) for is_stored in self._is_stored]
        of_params, of_x = jax.tree.unflatten(self._structure, leaves)(gradient)
        return of_params, of_x


def _evaluator(closed: Any, results: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return a function of the arguments of a jaxpr that computes some of its variables."""
    outvars = closed.jaxpr.outvars
    used = [False] * len(outvars)
    for v in results:
        used[_index(outvars, v)] = True
    traced, used_inputs = partial_eval.dce_jaxpr(closed.jaxpr, used)
    evaluate = jaxpr_as_fun(closed.replace(jaxpr=traced))
    kept = [v for v, is_used in zip(outvars, used, strict=True) if is_used]
    positions = [_index(kept, v) for v in results]

    def evaluated(*args: Any) -> list[Any]:
        outs = evaluate(*(x for x, is_used in zip(args, used_inputs, strict=True) if is_used))
        return [outs[i] for i in positions]

    return evaluated


def _index(variables: Sequence[Any], v: Any) -> int:
    return next(i for i, other in enumerate(variables) if other is v)


def _depends_beyond(closed: Any, i: int, n: int) -> bool:
    """Return whether the i-th result depends on other arguments than the first n."""
    v = closed.jaxpr.outvars[i]
    if isinstance(v, Literal):
        return False
    _, used_inputs = partial_eval.dce_jaxpr(closed.jaxpr, [j == i for j in range(len(closed.jaxpr.outvars))])
    return any(used_inputs[n:])


def _placeholder(aval: Any) -> Any:
    """Return a value for an argument that is not read."""
    return (
        jax.numpy.zeros(aval.shape, aval.dtype) if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else None
    )
