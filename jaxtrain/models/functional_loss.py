"""A module of flax.nnx, flax.linen or equinox, with its loss, as a loss function of its parameters."""

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.interpreters import partial_eval

from jaxtrain.errors import UserError, user_facing, warn_user
from jaxtrain.paths import path_name
from jaxtrain.program.rewrite import make_jaxpr
from jaxtrain.step import LossFn

CACHE = "cache"
"""linen's collection of what decoding keeps."""
STATISTICS = "batch_stats"
"""linen's collection of running statistics."""


class _Split(NamedTuple):
    """A module as arrays, and its loss as a function of them.

    Attributes:
      params: Pytree of the parameters.
      variables: Pytree of what the module has besides; None if it has none.
      is_state: Whether variables at a path are model state even if the loss does not change them.
      caches: Paths of the caches of decoding.
      compute: From (params, variables, batch, rng) to (loss, metrics, variables).
    """

    params: Any
    variables: Any
    is_state: Callable[[tuple[Any, ...]], bool]
    caches: Collection[tuple[Any, ...]]
    compute: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]


@user_facing
def functional_loss(model: Any, loss_fn: LossFn, batch: Any) -> tuple[LossFn, Any, Any]:
    """Split a module and its loss into what `jaxtrain.train_step` and `parity.Case` take.

    `loss_fn(model, batch, rng)` is a loss function with the module in place of its parameters: it calls the module as
    its library does, with keyword arguments, a method or `jax.vmap`. In evaluation `rng` is None.

    - nnx: the streams of the module's `Rngs` start from `rng`; in evaluation the module is in `eval()` mode.
    - linen: every stream is drawn from `rng`. A module that is not bound to variables is initialized by `loss_fn` with
      `jax.random.key(0)`; `module.bind(variables)` has its own.
    - equinox: dropout takes `rng` as its key; in evaluation the module is in inference mode. A module with state is
      passed as `eqx.nn.make_with_state` returns it, (module, state), and its loss is
      `loss_fn(model, batch, rng, state)`, which returns the new state as its third result.

    Running statistics, and other variables that the loss changes, are the model state. Caches of decoding, and
    parameters that the loss does not depend on, are left out; a warning names them.

    Args:
      model: `nnx.Module`, `linen.Module` or `equinox.Module`; shapes, as of `nnx.eval_shape`, are enough for
        `parity.Case`.
      loss_fn: The loss of the module; it returns (`jaxtrain.Loss`, metrics).
      batch: A batch, or its shapes.

    Returns:
      A tuple (loss_fn, params, model_state) of a loss function of parameters, the module's parameters, and its model
      state; None if it has none, and then the loss function takes and returns none.

    Raises:
      UserError: It is another kind of module, or only shapes are given where the loss depends on a constant.

    Example:
      >>> import jaxtrain as jt
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.dense = nnx.Linear(3, 4, rngs=rngs)
      ...         self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
      ...     def __call__(self, x, *, scale):
      ...         return self.dropout(self.norm(self.dense(x))) * scale
      >>> def loss_fn(model, batch, rng):
      ...     return jt.Loss.of((model(batch["x"], scale=2.0) - batch["y"]) ** 2), {}
      >>> batch = {"x": jnp.ones((5, 3)), "y": jnp.ones((5, 4))}
      >>> pure, params, model_state = functional_loss(Net(nnx.Rngs(0)), loss_fn, batch)
      >>> jax.tree.map(jnp.shape, params)
      {'dense': {'bias': (4,), 'kernel': (3, 4)}, 'norm': {'bias': (4,), 'scale': (4,)}}
      >>> jax.tree.map(jnp.shape, model_state)
      {'norm': {'mean': (4,), 'var': (4,)}}
      >>> loss, metrics, model_state = pure(params, batch, jax.random.key(0), model_state)
      >>> loss.weight
      20
    """
    split = _split(model, loss_fn, batch)
    used, read, changed = _dependencies(split, batch)
    params, unused = _parted(split.params, lambda path: path in used)
    state, constants = _parted(split.variables, lambda path: path in changed or split.is_state(path))
    _report([*map(path_name, unused)], [*map(path_name, split.caches)])
    for path, value in constants.items():
        if path in read and isinstance(value, jax.ShapeDtypeStruct):
            raise UserError(
                f"the loss depends on the constant {path_name(path)}, of which only the shape is given: "
                "pass the module itself, not its shapes"
            )

    def compute(params: Any, batch: Any, rng: Any, state: Any) -> tuple[Any, Any, Any]:
        whole = _joined(params, unused, split.params), _joined(state, constants, split.variables)
        loss, metrics, variables = split.compute(*whole, batch, rng)
        return loss, metrics, _parted(variables, lambda path: path not in constants)[0]

    def with_state(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, Any, Any]:
        return compute(params, batch, rng, model_state)

    def without_state(params: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        return compute(params, batch, rng, None)[:2]

    has_state = bool(jax.tree.leaves(state))
    return with_state if has_state else without_state, params, state if has_state else None


def _split(model: Any, loss_fn: LossFn, batch: Any) -> _Split:
    equinox = sys.modules.get("equinox")
    module, *state = model if isinstance(model, tuple) and len(model) == 2 else (model,)
    if isinstance(model, nnx.Module):
        return _split_nnx(model, loss_fn)
    if isinstance(model, linen.Module):
        return _split_linen(model, loss_fn, batch)
    if equinox is not None and isinstance(module, equinox.Module):
        return _split_equinox(equinox, module, state[0] if state else None, loss_fn)
    raise UserError(
        f"functional_loss takes a module of flax.nnx, flax.linen or equinox, got {type(model).__name__}: "
        "write loss_fn(params, batch, rng) for other models"
    )


def _split_nnx(model: nnx.Module, loss_fn: LossFn) -> _Split:
    parts: tuple[Any, ...] = nnx.split(model, nnx.Param, nnx.RngKey, nnx.RngCount, ...)
    graphdef, params, keys, counts, variables = parts
    paths = {kind: _paths(nnx.to_pure_dict(nnx.state(model, kind))) for kind in (nnx.BatchStat, nnx.Cache)}
    keys, counts = nnx.to_pure_dict(keys), nnx.to_pure_dict(counts)

    def compute(params: Any, variables: Any, batch: Any, rng: Any) -> tuple[Any, Any, Any]:
        streams = _streams(keys, jax.random.key(0) if rng is None else rng)
        model = nnx.merge(graphdef, params, streams, jax.tree.map(_zeros, counts), variables)
        if rng is None:
            model.eval()
        loss, metrics = loss_fn(model, batch, rng)
        _, *parts = nnx.split(model, nnx.Param, nnx.RngState, ...)
        return loss, metrics, nnx.to_pure_dict(parts[-1])

    is_state = paths[nnx.BatchStat].__contains__
    return _Split(nnx.to_pure_dict(params), nnx.to_pure_dict(variables), is_state, paths[nnx.Cache], compute)


def _streams(keys: Any, rng: jax.Array) -> Any:
    """Keys of the shapes of `keys`, each independent of the others."""
    leaves, structure = jax.tree.flatten(keys)
    folded = [(jax.random.fold_in(rng, i), like.shape) for i, like in enumerate(leaves)]
    return jax.tree.unflatten(structure, [jax.random.split(key, shape) if shape else key for key, shape in folded])


def _split_linen(module: linen.Module, loss_fn: LossFn, batch: Any) -> _Split:
    if module.scope is None:
        key = jax.random.key(0)
        variables: Any = jax.jit(linen.init(loss_fn, module))(key, jax.tree.map(_zeros, batch), key)
    else:
        module, variables = module.unbind()
    variables = dict(variables)
    params, cache = variables.pop("params", {}), variables.pop(CACHE, {})

    def compute(params: Any, variables: Any, batch: Any, rng: Any) -> tuple[Any, Any, Any]:
        apply = linen.apply(loss_fn, module, mutable=[*variables])
        # linen draws from the stream "params" for every stream that it is not given.
        rngs = None if rng is None else {"params": rng}
        (loss, metrics), changed = apply({"params": params, **variables}, batch, rng, rngs=rngs)
        return loss, metrics, {**variables, **changed}

    return _Split(params, variables, lambda path: path[0].key == STATISTICS, _paths({CACHE: cache}), compute)


def _split_equinox(equinox: Any, module: Any, state: Any, loss_fn: LossFn) -> _Split:
    params, static = equinox.partition(module, _is_inexact)

    def compute(params: Any, state: Any, batch: Any, rng: Any) -> tuple[Any, Any, Any]:
        model = equinox.combine(params, static)
        model = equinox.nn.inference_mode(model) if rng is None else model
        if state is None:
            return (*loss_fn(model, batch, rng), None)
        loss, metrics, state = loss_fn(model, batch, rng, state)
        return loss, metrics, state

    return _Split(params, state, lambda _: True, (), compute)


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _paths(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Return the leaves of a pytree by path."""
    return dict(jax.tree_util.tree_leaves_with_path(tree))


def _dependencies(split: _Split, batch: Any) -> tuple[set[Any], set[Any], set[Any]]:
    """Trace the loss in training; return the paths of the parameters and variables that it depends on, and of the
    variables that it changes."""

    def compute(params: Any, variables: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        loss, _, variables = split.compute(params, variables, batch, rng)
        return loss, variables

    jaxpr = make_jaxpr(compute)(split.params, split.variables, batch, jax.random.key(0)).jaxpr
    params, variables = _paths(split.params), _paths(split.variables)
    before = dict(zip(variables, jaxpr.invars[len(params) :], strict=False))
    after = dict(zip(reversed(variables), reversed(jaxpr.outvars), strict=False))
    changed = {path for path in variables if before[path] is not after[path] and path not in split.caches}
    of_loss = [True] * (len(jaxpr.outvars) - len(variables))
    _, used = partial_eval.dce_jaxpr(jaxpr, [*of_loss, *(path in changed for path in variables)])
    inputs = [*zip([*params, *variables], used, strict=False)]
    return (
        {path for path, is_used in inputs[: len(params)] if is_used},
        {path for path, is_used in inputs[len(params) :] if is_used},
        changed,
    )


def _parted(tree: Any, kept: Callable[[tuple[Any, ...]], bool]) -> tuple[Any, dict[tuple[Any, ...], Any]]:
    """Return `tree` with the leaves at the paths that are `kept`, and the others by path."""
    left_out = {path: leaf for path, leaf in _paths(tree).items() if not kept(path)}
    if not left_out:
        return tree, {}
    return _pruned(jax.tree_util.tree_map_with_path(lambda path, x: x if kept(path) else None, tree)), left_out


def _pruned(tree: Any) -> Any:
    """Return nested dicts without entries that have no leaf."""
    if not isinstance(tree, Mapping):
        return tree
    return {key: _pruned(value) for key, value in tree.items() if jax.tree.leaves(value)}


def _joined(kept: Any, left_out: Mapping[tuple[Any, ...], Any], like: Any) -> Any:
    """Return the inverse of `_parted`. Of a leaf that the loss does not depend on, the shape is enough."""
    leaves = {**_paths(kept), **left_out}
    values = [_zeros(x) if isinstance(x := leaves[path], jax.ShapeDtypeStruct) else x for path in _paths(like)]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _report(unused: Collection[str], caches: Collection[str]) -> None:
    """Warn of what is left out."""
    if unused:
        warn_user(f"the loss does not depend on {', '.join(unused)}: left out of the parameters")
    if caches:
        warn_user(f"{', '.join(caches)} are caches of decoding: left out of the model state")
