"""Low-rank adapters (Hu et al. 2021) for any model, compatible with `peft`.

A kernel W [in, out] stays fixed, and two thin kernels A [in, r] and B [r, out] are trained: x W becomes
x W + α/r · (x A) B. The model is not changed. Its jaxpr is evaluated with an adapted kernel in place of W, through
scans and rematerialized blocks. A product by W adds the second product, so that no gradient of the size of W is
computed; any other operation uses W + α/r · A B. A kernel may also be stored [out, in], as in PyTorch.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.models.dropout import dropout
from jaxtrain.paths import path_name
from jaxtrain.transforms import biased_products, jaxpr

# Calls that pass their arguments one by one, so that an adapted kernel reaches the body.
_CALLS = frozenset({"jit", "pjit", "remat2", "checkpoint"})


@dataclass(frozen=True)
class LoraConfig:
    """Configuration of low-rank adapters.

    Args:
      targets: Regular expression that matches the whole paths of the kernels, such as "blocks/(qkv|fc)/kernel".
      r: Rank.
      alpha: Numerator of the scale.
      dropout: Dropout rate on the inputs of the adapters.
      rslora: Whether the scale is α/√r (Kalajdzievski 2023) instead of α/r.
      out_in: Regular expression that matches the whole paths of kernels stored [out, in], as in `torch.nn.Linear`;
        `ImportedModel.lora_config` fills it in.

    Raises:
      UserError: The rank is not positive or the dropout rate is not in [0, 1).

    Example:
      >>> LoraConfig("kernel", r=4, alpha=8).scale, LoraConfig("kernel", r=4, alpha=8, rslora=True).scale
      (2.0, 4.0)
    """

    targets: str
    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    rslora: bool = False
    out_in: str = ""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UserError(f"r must be at least 1, got {self.r}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"LoRA dropout must be in [0, 1), got {self.dropout}")

    @property
    def scale(self) -> float:
        """Factor of the product of the adapters."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    def is_out_in(self, path: str) -> bool:
        """Return whether the kernel at a path is stored [out, in]."""
        return bool(self.out_in) and re.fullmatch(self.out_in, path) is not None


def init(key: jax.Array, params: Any, config: LoraConfig) -> dict[str, Any]:
    """Create adapters for the targeted kernels, initialized as in `peft`: A uniform within ±1/√in, B zero.

    Args:
      key: Key of the initial values.
      params: Parameters of the model. A kernel is [in, out], or [out, in] where `config` says so, with a first axis for
        layers that are stacked.
      config: Configuration, whose `targets` select the kernels.

    Returns:
      Nested dicts that end in {"a": [..., in, r], "b": [..., r, out]} at the path of every targeted kernel, in its
      dtype.

    Raises:
      UserError: `targets` match nothing, or a parameter that is not the kernel of a linear layer.

    Example:
      >>> params = {"fc": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}}
      >>> jax.tree.map(jnp.shape, init(jax.random.key(0), params, LoraConfig("fc/kernel", r=2)))
      {'fc': {'kernel': {'a': (6, 2), 'b': (2, 4)}}}
    """
    adapters = {}
    for i, (path, kernel) in enumerate(_targets(params, config)):
        *layers, n, m = _in_out(kernel.shape, config.is_out_in(path))
        bound = 1 / math.sqrt(n)
        a = jax.random.uniform(jax.random.fold_in(key, i), (*layers, n, config.r), kernel.dtype, -bound, bound)
        adapters[path] = {"a": a, "b": jnp.zeros((*layers, config.r, m), kernel.dtype)}
    nested: dict[str, Any] = unflatten_dict(adapters, sep="/")
    return nested


def frozen(path: str) -> bool:
    """Return whether a path of {"base": params, "lora": adapters} is frozen: the `frozen` of `train_step`."""
    return path.startswith("base/")


def sharding(rules: Mapping[str, P], config: LoraConfig | None = None) -> dict[str, P]:
    """Return sharding rules of {"base": params, "lora": adapters} from the rules of `params`.

    A is sharded as the inputs of its kernel, B as the outputs.

    Args:
      rules: Rules of the parameters.
      config: Configuration of the adapters; needed for kernels stored [out, in].

    Example:
      >>> sharding({"fc/kernel": P("fsdp", "tensor")})["lora/(fc/kernel)/b"]
      P(None, 'tensor')
    """
    base = {f"base/({pattern})": spec for pattern, spec in rules.items()}
    out_in = {} if config is None or not config.out_in else _half_rules(rules, f"(?=({config.out_in})/.$)", (-1, -2))
    return base | out_in | _half_rules(rules, "", (-2, -1))


def _half_rules(rules: Mapping[str, P], only: str, axes: tuple[int, int]) -> dict[str, P]:
    """Return rules of A and B from the axes of inputs and of outputs of their kernels."""
    found = {}
    for pattern, spec in rules.items():
        layers, (n, m) = spec[:-2], (spec[axis] if len(spec) >= 2 else None for axis in axes)
        found[f"lora/{only}({pattern})/a"] = P(*layers, n, None)
        found[f"lora/{only}({pattern})/b"] = P(*layers, None, m)
    return found


def with_adapters(apply: Callable[..., Any], config: LoraConfig) -> Callable[..., Any]:
    """Return a function that computes `apply` with adapters.

    Args:
      apply: Function `apply(params, *inputs)`: a model or a whole loss function.
      config: Configuration of the adapters.

    Returns:
      A function of {"base": params, "lora": adapters} and the same inputs. With a key, `rng=`, the inputs of every
      adapter get their own dropout mask. It raises `UserError` for adapters of another model.

    Example:
      >>> def apply(params, x):
      ...     return x @ params["w"]
      >>> params = {"w": jnp.eye(2)}
      >>> adapters = {"w": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
      >>> with_adapters(apply, LoraConfig("w", r=1, alpha=3.0))({"base": params, "lora": adapters}, jnp.ones((1, 2)))
      Array([[7., 7.]], dtype=float32)
    """

    def apply_adapted(params: Mapping[str, Any], *inputs: Any, rng: jax.Array | None = None) -> Any:
        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            del leaves
            tree = _with_adapters(params["base"], params["lora"], config, rng)
            kernels = jax.tree.leaves(tree, is_leaf=_is_adapted)
            outs = jaxpr.interpret(closed.jaxpr, closed.consts, kernels, _Rule(closed))
            return [*map(_merged, outs)]

        # The inputs are closed over, because some may not be arrays.
        return jaxpr.retrace(lambda base: apply(base, *inputs), evaluate)(params["base"])

    return apply_adapted


def merge(params: Any, adapters: Any, config: LoraConfig) -> Any:
    """Return `params` with every targeted W replaced by W + α/r · A B, for use without adapters.

    Example:
      >>> adapters = {"w": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
      >>> merge({"w": jnp.zeros((2, 2))}, adapters, LoraConfig("w", r=1, alpha=3.0))["w"].tolist()
      [[3.0, 3.0], [3.0, 3.0]]
    """
    return jax.tree.map(_merged, _with_adapters(params, adapters, config, None), is_leaf=_is_adapted)


def unmerge(params: Any, adapters: Any, config: LoraConfig) -> Any:
    """Return the parameters from which `merge` computed these, up to rounding."""
    return merge(params, adapters, replace(config, alpha=-config.alpha))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Adapted:
    """A kernel, or a stack of kernels, with its adapters; a pytree, so that scans slice it by layer."""

    kernel: Any
    a: Any
    b: Any
    key: Any
    name: str = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    rate: float = field(metadata={"static": True})
    out_in: bool = field(metadata={"static": True})


def _is_adapted(x: Any) -> bool:
    return isinstance(x, _Adapted)


def _with_adapters(params: Any, adapters: Any, config: LoraConfig, rng: jax.Array | None) -> Any:
    """Return `params` with an `_Adapted` for every kernel that has adapters."""
    halves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(adapters)}
    unplaced, names = set(halves), iter(range(len(halves)))

    def leaf(path: Any, kernel: Any) -> Any:
        name = path_name(path)
        if not {f"{name}/a", f"{name}/b"} <= unplaced:
            return kernel
        unplaced.difference_update({f"{name}/a", f"{name}/b"})
        a, b = halves[f"{name}/a"], halves[f"{name}/b"]
        out_in = config.is_out_in(name)
        _check_fits(name, kernel, a, b, out_in)
        key = None if rng is None or config.dropout == 0.0 else jax.random.fold_in(rng, next(names))
        if key is not None and a.ndim > 2:
            key = jax.random.split(key, a.shape[0])
        return _Adapted(kernel, a, b, key, name, config.scale, config.dropout, out_in)

    tree = jax.tree_util.tree_map_with_path(leaf, params)
    if unplaced:
        raise UserError(f"the adapters {sorted(unplaced)} match no kernel: use the model they belong to")
    return tree


def _in_out(shape: Sequence[int], out_in: bool) -> tuple[int, ...]:
    """Return the shape of a kernel or of a stack as [..., in, out]."""
    *layers, n, m = shape
    return (*layers, m, n) if out_in else (*layers, n, m)


def _check_fits(name: str, kernel: Any, a: Any, b: Any, out_in: bool) -> None:
    *layers, n, m = _in_out(kernel.shape, out_in)
    if a.shape != (*layers, n, a.shape[-1]) or b.shape != (*layers, a.shape[-1], m):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise UserError(f"the adapters of {name} {list(kernel.shape)} are {shapes}: use the model they belong to")


def _merged(x: Any) -> Any:
    """Return W + scale · A B in the dtype of W; other values as they are.

    With dropout it raises `UserError`: without a product by W there is no input to drop.
    """
    if not _is_adapted(x):
        return x
    if x.key is not None:
        raise UserError(f"{x.name} is used otherwise than in x @ W, so its adapters must have dropout 0")
    delta = x.scale * jnp.matmul(x.a, x.b, precision="highest")
    delta = jnp.swapaxes(delta, -1, -2) if x.out_in else delta
    return x.kernel + delta.astype(x.kernel.dtype)


class _Rule:
    """Evaluation rule for equations that have adapted kernels as arguments.

    As in PyTorch the bias is added before the product of the adapters, which `pending` holds until then.
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
            carry = map(_merged, args[n_consts : n_consts + n_carry])
            return jaxpr.HIGHER_ORDER[name](eqn, [*args[:n_consts], *carry, *args[n_consts + n_carry :]], run)
        if name == "transpose" and eqn.params["permutation"] == (1, 0):
            (kernel,) = jaxpr.bind(eqn, [args[0].kernel])
            return [replace(args[0], kernel=kernel, out_in=not args[0].out_in)]
        if name == "dot_general" and _multiplies_by(eqn, args):
            return self._product(eqn, *args)
        args = [*map(_merged, args)]
        rebuild = jaxpr.HIGHER_ORDER.get(name)
        return jaxpr.bind(eqn, args) if rebuild is None else rebuild(eqn, args, run)

    def _product(self, eqn: JaxprEqn, x: jax.Array, adapted: _Adapted) -> list[Any]:
        (product,) = jaxpr.bind(eqn, [x, adapted.kernel])
        delta = _adapter_product(eqn, x, adapted)
        total = self.totals.get(eqn.outvars[0])
        if total is None:
            return [product + delta.astype(product.dtype)]
        self.pending[total] = delta
        return [product]


def _biased(traced: Jaxpr) -> Iterator[tuple[Var, Var]]:
    """Yield (product, its sum with a bias) of this jaxpr and of those it calls."""
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
    """Whether the equation multiplies activations by an adapted kernel along its inputs."""
    x, kernel = args
    (_, contracted), batch = eqn.params["dimension_numbers"]
    if _is_adapted(x) or kernel.a.ndim != 2:
        return False
    return contracted == (int(kernel.out_in),) and batch == ((), ())


def _adapter_product(eqn: JaxprEqn, x: jax.Array, adapted: _Adapted) -> jax.Array:
    """Return scale · (x A) B, after dropout of x."""
    x = dropout(x.astype(adapted.a.dtype), adapted.rate, adapted.key)
    precision = eqn.params["precision"]
    (contracted, _), batch = eqn.params["dimension_numbers"]
    thin = lax.dot_general(x, adapted.a, ((contracted, (0,)), batch), precision=precision)
    return adapted.scale * jnp.matmul(thin, adapted.b, precision=precision)


def _targets(params: Any, config: LoraConfig) -> list[tuple[str, Any]]:
    """Return (path, kernel) of the targeted kernels."""
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    found = [(path, leaf) for path, leaf in named if re.fullmatch(config.targets, path)]
    if not found:
        kernels = ", ".join(path for path, leaf in named if len(leaf.shape) > 1)
        raise UserError(f"LoRA targets {config.targets!r} match no whole path: the model has {kernels}")
    for path, leaf in found:
        if len(leaf.shape) not in (2, 3) or path.rpartition("/")[2] in ("bias", "scale"):
            what = f"{path} {list(leaf.shape)}, which is not the kernel of a linear layer"
            raise UserError(f"LoRA targets {config.targets!r} match {what}: exclude it")
    return found
