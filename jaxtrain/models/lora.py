"""Low-rank adapters (Hu et al. 2021) on any model, as `peft` computes, names and keeps them.

A kernel W [in, out] stays as it is and beside it two thin ones are trained: x W becomes x W + α/r · (x A) B, with
A [in, r] and B [r, out]. The model need not know. Its jaxpr is evaluated with the adapters beside their kernels,
through scans and rematerialised blocks: where such a kernel is multiplied by, the second product is added (so that no
gradient of W's size is ever computed); whatever else is done with it is done with W + α/r · A B.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.models.dropout import dropout
from jaxtrain.paths import path_name
from jaxtrain.transforms import biased_products, jaxpr

# What hands its arguments to a body of equations one by one, so that a kernel comes there with its adapters.
_CALLS = frozenset({"jit", "pjit", "remat2", "checkpoint"})


@dataclass(frozen=True)
class LoraConfig:
    """`targets`: a regular expression of the kernels' whole paths, "blocks/(qkv|fc)/kernel"; the rank `r`; `alpha`,
    of the scale; the rate of `dropout` on what the adapters are given; `rslora`: the scale is α/√r, not α/r
    (Kalajdzievski 2023).

    >>> LoraConfig("kernel", r=4, alpha=8).scale, LoraConfig("kernel", r=4, alpha=8, rslora=True).scale
    (2.0, 4.0)
    """

    targets: str
    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UserError(f"LoRA of rank {self.r} adapts nothing: make r 1 or more")
        if not 0 <= self.dropout < 1:
            raise UserError(f"LoRA dropout {self.dropout} is no rate: choose one from 0 to below 1")

    @property
    def scale(self) -> float:
        """What the adapters' product is multiplied by."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


def init(key: jax.Array, params: Any, config: LoraConfig) -> dict[str, Any]:
    """Fresh adapters of the kernels of `params` that are `config.targets`: nested dicts as `params`, of "a" and "b".

    A kernel is [in, out], or [layers, in, out] where a model stacks its layers; so are its adapters. As in `peft`, A is
    uniform within ±1/√in and B zero, so that they change nothing yet. Their dtypes are the kernels'. Raises `UserError`
    where nothing is a target, or something that is no kernel.

    >>> params = {"fc": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}}
    >>> jax.tree.map(jnp.shape, init(jax.random.key(0), params, LoraConfig("fc/kernel", r=2)))
    {'fc': {'kernel': {'a': (6, 2), 'b': (2, 4)}}}
    """
    adapters = {}
    for i, (path, kernel) in enumerate(_targets(params, config)):
        *layers, n, m = kernel.shape
        bound = 1 / math.sqrt(n)
        a = jax.random.uniform(jax.random.fold_in(key, i), (*layers, n, config.r), kernel.dtype, -bound, bound)
        adapters[path] = {"a": a, "b": jnp.zeros((*layers, config.r, m), kernel.dtype)}
    return nested(adapters)


def frozen(path: str) -> bool:
    """For `train_step(…, frozen=lora.frozen)`: of {"base": params, "lora": adapters} the adapters alone are trained."""
    return path.startswith("base/")


def sharding(rules: Mapping[str, P]) -> dict[str, P]:
    """The rules of {"base": params, "lora": adapters}, by those of `params`: A is divided as the rows of its kernel
    are, B as the columns.

    >>> sharding({"fc/kernel": P("fsdp", "tensor")})["lora/(fc/kernel)/b"]
    P(None, 'tensor')
    """
    base = {f"base/({pattern})": spec for pattern, spec in rules.items()}
    a = {f"lora/({pattern})/a": P(*spec[:-1], None) for pattern, spec in rules.items()}
    b = {f"lora/({pattern})/b": P(*spec[:-2], None, *spec[-1:]) for pattern, spec in rules.items()}
    return base | a | b


def adapted(apply: Callable[..., Any], config: LoraConfig) -> Callable[..., Any]:
    """`apply(params, *inputs)` with adapters: a function of {"base": params, "lora": adapters} and the same inputs.

    With a key, `rng=`, what the adapters are given is dropped at the rate `config.dropout`, a mask for each. Raises
    `UserError` for adapters of another model.

    >>> def apply(params, x):
    ...     return x @ params["w"]
    >>> params = {"w": jnp.eye(2)}
    >>> adapters = {"w": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
    >>> adapted(apply, LoraConfig("w", r=1, alpha=3.0))({"base": params, "lora": adapters}, jnp.ones((1, 2)))
    Array([[7., 7.]], dtype=float32)
    """

    def apply_adapted(params: Mapping[str, Any], *inputs: Any, rng: jax.Array | None = None) -> Any:
        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            del leaves
            tree = _with_adapters(params["base"], params["lora"], config, rng)
            kernels = jax.tree.leaves(tree, is_leaf=_is_adapted)
            outs = jaxpr.interpret(closed.jaxpr, closed.consts, kernels, _Rule(closed))
            return [*map(_whole, outs)]

        # The inputs are closed over: some of them may be no arrays.
        return jaxpr.retrace(lambda base: apply(base, *inputs), evaluate)(params["base"])

    return apply_adapted


def merge(params: Any, adapters: Any, config: LoraConfig) -> Any:
    """`params` with W + α/r · A B in W's place, to be served, saved or exported without adapters.

    >>> adapters = {"w": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
    >>> merge({"w": jnp.zeros((2, 2))}, adapters, LoraConfig("w", r=1, alpha=3.0))["w"].tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    return jax.tree.map(_whole, _with_adapters(params, adapters, config, None), is_leaf=_is_adapted)


def unmerge(params: Any, adapters: Any, config: LoraConfig) -> Any:
    """The params of which `merge` made these, but for rounding."""
    return merge(params, adapters, replace(config, alpha=-config.alpha))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Adapted:
    """A kernel [in, out] with its adapters, or a stack of them: a pytree, of which scan hands on one layer after
    another. `key`, of the dropout, or None."""

    kernel: Any
    a: Any
    b: Any
    key: Any
    name: str = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    rate: float = field(metadata={"static": True})


def _is_adapted(x: Any) -> bool:
    return isinstance(x, _Adapted)


def _with_adapters(params: Any, adapters: Any, config: LoraConfig, rng: jax.Array | None) -> Any:
    """`params` with an `_Adapted` where there are adapters."""
    halves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(adapters)}
    unplaced, names = set(halves), iter(range(len(halves)))

    def leaf(path: Any, kernel: Any) -> Any:
        name = path_name(path)
        if not {f"{name}/a", f"{name}/b"} <= unplaced:
            return kernel
        unplaced.difference_update({f"{name}/a", f"{name}/b"})
        a, b = halves[f"{name}/a"], halves[f"{name}/b"]
        _check_fits(name, kernel, a, b)
        key = None if rng is None or config.dropout == 0.0 else jax.random.fold_in(rng, next(names))
        if key is not None and a.ndim > 2:
            key = jax.random.split(key, a.shape[0])
        return _Adapted(kernel, a, b, key, name, config.scale, config.dropout)

    tree = jax.tree_util.tree_map_with_path(leaf, params)
    if unplaced:
        raise UserError(f"the adapters {sorted(unplaced)} fit no kernel: give them the model they are of")
    return tree


def _check_fits(name: str, kernel: Any, a: Any, b: Any) -> None:
    *layers, n, m = kernel.shape
    if a.shape != (*layers, n, a.shape[-1]) or b.shape != (*layers, a.shape[-1], m):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise UserError(f"the adapters of {name} {list(kernel.shape)} are {shapes}: give them the model they are of")


def _whole(x: Any) -> Any:
    """W + scale · A B, in W's dtype; what is not adapted as it is.

    Raises `UserError` where something is to be dropped, which is what W would be multiplied by.
    """
    if not _is_adapted(x):
        return x
    if x.key is not None:
        raise UserError(f"{x.name} is not only multiplied by, x @ W: no dropout of its adapters; make their rate 0")
    delta = x.scale * jnp.matmul(x.a, x.b, precision="highest")
    return x.kernel + delta.astype(x.kernel.dtype)


class _Rule:
    """How equations are evaluated whose arguments are adapted kernels.

    A bias is added to the product before the adapters' is, as PyTorch has it in the product: `pending` keeps the
    latter for the equation that adds it.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.totals = dict(_biased(closed.jaxpr))
        self.pending: dict[Var, Any] = {}

    def __call__(self, eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        if eqn.outvars and eqn.outvars[0] in self.pending:
            (total,) = jaxpr.bind(eqn, args)
            return [total + self.pending.pop(eqn.outvars[0]).astype(total.dtype)]
        if not any(map(_is_adapted, args)):
            return None
        name = eqn.primitive.name
        if name in _CALLS:
            return jaxpr.HIGHER_ORDER[name](eqn, args, run)
        if name == "scan":
            n_consts, n_carry = jaxpr.scan_sizes(eqn)
            carry = map(_whole, args[n_consts : n_consts + n_carry])
            return jaxpr.HIGHER_ORDER[name](eqn, [*args[:n_consts], *carry, *args[n_consts + n_carry :]], run)
        if name == "dot_general" and _multiplies_by(eqn, args):
            return self._product(eqn, *args)
        args = [*map(_whole, args)]
        rebuild = jaxpr.HIGHER_ORDER.get(name)
        return jaxpr.bind(eqn, args) if rebuild is None else rebuild(eqn, args, run)

    def _product(self, eqn: JaxprEqn, x: jax.Array, adapted: _Adapted) -> list[Any]:
        (product,) = jaxpr.bind(eqn, [x, adapted.kernel])
        beside = _beside(eqn, x, adapted)
        total = self.totals.get(eqn.outvars[0])
        if total is None:
            return [product + beside.astype(product.dtype)]
        self.pending[total] = beside
        return [product]


def _biased(traced: Jaxpr) -> Iterator[tuple[Var, Var]]:
    """(product, its sum with a bias), here and in everything called, where nothing is between the two."""
    sums = {found.total: found.product for found in biased_products(traced)}
    for eqn in _equations(traced):
        product = sums.get(eqn.outvars[0]) if eqn.outvars else None
        if product is not None and any(v is product for v in eqn.invars):
            yield product, eqn.outvars[0]


def _equations(traced: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in traced.eqns:
        yield eqn
        for inner in jaxpr.inner_jaxprs(eqn):
            yield from _equations(inner)


def _multiplies_by(eqn: JaxprEqn, args: list[Any]) -> bool:
    """Whether the equation is x W: activations [..., in] by a kernel [in, out]."""
    x, kernel = args
    (_, contracted), batch = eqn.params["dimension_numbers"]
    if _is_adapted(x) or kernel.a.ndim != 2:
        return False
    return contracted == (0,) and batch == ((), ())


def _beside(eqn: JaxprEqn, x: jax.Array, adapted: _Adapted) -> jax.Array:
    """scale · (x A) B, of `x` dropped."""
    x = dropout(x.astype(adapted.a.dtype), adapted.rate, adapted.key)
    precision = eqn.params["precision"]
    thin = lax.dot_general(x, adapted.a, eqn.params["dimension_numbers"], precision=precision)
    return adapted.scale * jnp.matmul(thin, adapted.b, precision=precision)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What is at paths, in nested dicts.

    >>> nested({"blocks/fc/kernel": 1, "blocks/qkv/kernel": 2})
    {'blocks': {'fc': {'kernel': 1}, 'qkv': {'kernel': 2}}}
    """
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _targets(params: Any, config: LoraConfig) -> list[tuple[str, Any]]:
    """(path, kernel) of those that are to be adapted."""
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    found = [(path, leaf) for path, leaf in named if re.fullmatch(config.targets, path)]
    if not found:
        kernels = ", ".join(path for path, leaf in named if len(leaf.shape) > 1)
        raise UserError(f"LoRA's targets {config.targets!r} match nothing whole: of the model are {kernels}")
    for path, leaf in found:
        if len(leaf.shape) not in (2, 3) or path.rpartition("/")[2] in ("bias", "scale"):
            what = f"{path} {list(leaf.shape)}, no linear layer's kernel"
            raise UserError(f"LoRA's targets {config.targets!r} match {what}: leave it out")
    return found
