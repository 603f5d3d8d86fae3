"""Low-rank adapters (Hu et al. 2021) for any model, compatible with `peft`.

A kernel W [in, out] stays fixed, and two thin kernels A [in, r] and B [r, out] are trained: x W becomes
x W + α/r · (x A) B. The model is not changed (`jaxtrain.models.parameter_forms`). A product by W adds the second
product, so that no gradient of the size of W is computed; any other operation uses W + α/r · A B. A kernel may also be
stored [out, in], as in PyTorch, and in 4 bits (`jaxtrain.models.nf4`).

DoRA (Liu et al. 2024) also trains the norms of the columns, m [out]: with V = W + α/r · A B the kernel is m ⊙ V / ‖V‖,
whose norm ‖V‖ is a constant to the gradient, as section 4.3 of the paper proposes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.models.layers.dropout import dropout
from jaxtrain.models.parameter_forms import KernelForm, Product, evaluate, is_form
from jaxtrain.passes import autocast_disabled
from jaxtrain.paths import path_name
from jaxtrain.program import equations
from jaxtrain.program.follow import used


@dataclass(frozen=True)
class LoraConfig:
    """Configuration of low-rank adapters.

    Args:
      targets: Regular expression that matches the whole paths of the kernels, such as "blocks/(qkv|fc)/kernel".
      r: Rank.
      alpha: Numerator of the scale.
      dropout: Dropout rate on the inputs of the adapters.
      rslora: Whether the scale is α/√r (Kalajdzievski 2023) instead of α/r.
      dora: Whether the norms of the columns are trained as well (Liu et al. 2024).
      out_in: Regular expression that matches the whole paths of kernels stored [out, in], as in `torch.nn.Linear`;
        `ImportedModel.lora_config` fills it in.
      trained: Regular expression that matches the whole paths of parameters that are trained themselves, beside the
        adapters, such as the head of a classifier: `modules_to_save` of `peft`.

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
    dora: bool = False
    out_in: str = ""
    trained: str = ""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UserError(f"r must be at least 1, got {self.r}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"LoRA dropout must be in [0, 1), got {self.dropout}")

    @property
    def scale(self) -> float:
        """Factor of the product of the adapters."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    def is_trained(self, path: str) -> bool:
        """Return whether the parameter at a path is trained itself."""
        return bool(self.trained) and re.fullmatch(self.trained, path) is not None

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
      Nested dicts that end in {"a": [..., in, r], "b": [..., r, out]} at the path of every targeted kernel, with DoRA
      also {"m": [..., out]}, the norms of the kernel's columns, and copies of the parameters that are trained
      themselves, at their paths. They are in the dtype of the kernel or parameter, in float32 at least.

    Raises:
      UserError: `targets` match nothing, or a parameter that is not the kernel of a linear layer; `trained` matches
        nothing, or a targeted kernel.

    Example:
      >>> params = {"fc": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}}
      >>> jax.tree.map(jnp.shape, init(jax.random.key(0), params, LoraConfig("fc/kernel", r=2)))
      {'fc': {'kernel': {'a': (6, 2), 'b': (2, 4)}}}
    """
    adapters: dict[str, Any] = _copies(params, config)
    for i, (path, kernel) in enumerate(_targets(params, config)):
        *layers, n, m = _in_out(kernel.shape, config.is_out_in(path))
        bound, dtype = 1 / math.sqrt(n), np.promote_types(kernel.dtype, np.float32)
        a = jax.random.uniform(jax.random.fold_in(key, i), (*layers, n, config.r), dtype, -bound, bound)
        adapters[path] = {"a": a, "b": jnp.zeros((*layers, config.r, m), dtype)}
        if config.dora:
            norms = partial(_column_norms, out_in=config.is_out_in(path), dtype=dtype)
            adapters[path]["m"] = lax.map(norms, kernel) if layers else norms(kernel)
    nested: dict[str, Any] = unflatten_dict(adapters, sep="/")
    return nested


def _copies(params: Any, config: LoraConfig) -> dict[str, jax.Array]:
    """Return copies of the parameters that are trained themselves, by path."""
    named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_form)}
    found = {path: used(leaf) for path, leaf in named.items() if config.is_trained(path)}
    if config.trained and not found:
        raise UserError(f"trained {config.trained!r} matches no whole path: the model has {', '.join(named)}")
    if both := sorted(path for path in found if re.fullmatch(config.targets, path)):
        raise UserError(f"{', '.join(both)} cannot have adapters and be trained itself: change targets or trained")
    return {path: jnp.array(x, np.promote_types(x.dtype, np.float32)) for path, x in found.items()}


def frozen(path: str) -> bool:
    """Return whether a path of {"base": params, "lora": adapters} is frozen: the `frozen` of `train_step`."""
    return path.startswith("base/")


def sharding(rules: Mapping[str, P], config: LoraConfig | None = None) -> dict[str, P]:
    """Return sharding rules of {"base": params, "lora": adapters} from the rules of `params`.

    A is sharded as the inputs of its kernel, B and the norms of DoRA as the outputs; a parameter that is trained itself
    as the original.

    Args:
      rules: Rules of the parameters.
      config: Configuration of the adapters; needed for kernels stored [out, in].

    Example:
      >>> sharding({"fc/kernel": P("fsdp", "tensor")})["lora/(fc/kernel)/b"]
      P(None, 'tensor')
    """
    base = {f"base/({pattern})": spec for pattern, spec in rules.items()}
    out_in = {} if config is None or not config.out_in else _half_rules(rules, f"(?=({config.out_in})/.$)", (-1, -2))
    itself = {f"lora/({pattern})": spec for pattern, spec in rules.items()}
    return base | out_in | _half_rules(rules, "", (-2, -1)) | itself


def _half_rules(rules: Mapping[str, P], only: str, axes: tuple[int, int]) -> dict[str, P]:
    """Return rules of A and B from the axes of inputs and of outputs of their kernels."""
    found = {}
    for pattern, spec in rules.items():
        layers, (n, m) = spec[:-2], (spec[axis] if len(spec) >= 2 else None for axis in axes)
        found[f"lora/{only}({pattern})/a"] = P(*layers, n, None)
        found[f"lora/{only}({pattern})/b"] = P(*layers, None, m)
        found[f"lora/{only}({pattern})/m"] = P(*layers, m)
    return found


def with_adapters(apply: Callable[..., Any], config: LoraConfig) -> Callable[..., Any]:
    """Return a function that computes `apply` with adapters, and with the parameters that are trained themselves.

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
        adapted = _with_adapters(params["base"], params["lora"], config, rng)
        # The inputs are closed over, because some may not be arrays.
        return evaluate(lambda base: apply(base, *inputs), params["base"], adapted)

    return apply_adapted


def merge(params: Any, adapters: Any, config: LoraConfig) -> Any:
    """Return `params` with every targeted W replaced by the adapted kernel, for use without adapters.

    Parameters that are trained themselves replace the original ones, in their dtypes. Quantized kernels are
    dequantized.

    Example:
      >>> adapters = {"w": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
      >>> merge({"w": jnp.zeros((2, 2))}, adapters, LoraConfig("w", r=1, alpha=3.0))["w"].tolist()
      [[3.0, 3.0], [3.0, 3.0]]
    """
    return jax.tree.map(used, _with_adapters(params, adapters, config, None), is_leaf=is_form)


def adapted(params: Any, adapters: Any, config: LoraConfig) -> Any:
    """Return `params` with adapted kernels, which `generate` and `stream` compute with without merging them.

    Quantized kernels stay quantized. The norms of DoRA are computed once, here.

    Example:
      >>> adapters = {"w": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
      >>> adapted({"w": jnp.zeros((2, 2))}, adapters, LoraConfig("w", r=1, alpha=3.0))["w"].array().tolist()
      [[3.0, 3.0], [3.0, 3.0]]
    """

    def leaf(x: Any) -> Any:
        return replace(x, factor=_factor(x)) if isinstance(x, _Adapted) and x.m is not None else x

    return jax.tree.map(leaf, _with_adapters(params, adapters, config, None), is_leaf=is_form)


def unmerge(params: Any, adapters: Any, config: LoraConfig) -> Any:
    """Return the parameters from which `merge` computed these, up to rounding.

    Raises:
      UserError: The adapters are DoRA's, which do not tell the norms of the kernels before; or there are parameters
        that are trained themselves.
    """
    if config.dora or config.trained:
        what = "DoRA adapters" if config.dora else f"parameters trained themselves, {config.trained!r},"
        raise UserError(f"{what} cannot be unmerged: keep the parameters of the base model")
    return merge(params, adapters, replace(config, alpha=-config.alpha))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Adapted(KernelForm):
    """A kernel, or a stack of kernels, with its adapters."""

    kernel: Any
    a: Any
    b: Any
    m: Any
    key: Any
    name: str = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    rate: float = field(metadata={"static": True})
    out_in: bool = field(metadata={"static": True})
    factor: Any = None
    """m / ‖V‖, if it was computed before."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape)

    @property
    def dtype(self) -> Any:
        return self.kernel.dtype

    @property
    def inputs_axis(self) -> int:
        return int(self.out_in)

    def transpose(self) -> "_Adapted":
        kernel = self.kernel.transpose() if is_form(self.kernel) else self.kernel.T
        return replace(self, kernel=kernel, out_in=not self.out_in)

    def astype(self, dtype: Any) -> "_Adapted":
        return replace(self, kernel=self.kernel.astype(dtype))

    def array(self) -> jax.Array:
        """Return W + scale · A B, or m ⊙ (W + scale · A B) / ‖W + scale · A B‖, in the dtype of W.

        With dropout it raises `UserError`: without a product by W there is no input to drop.
        """
        if self.key is not None:
            raise UserError(f"{self.name} is used otherwise than in x @ W, so its adapters must have dropout 0")
        adapted = self._sum()
        if self.m is not None:
            factor = self.magnification().astype(adapted.dtype)
            adapted = adapted * jnp.expand_dims(factor, -1 if self.out_in else -2)
        return adapted

    def product(self, product: Product, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return x W, and what is added for the adapters, after dropout of x."""
        result = product(x, self.kernel)
        dropped = dropout(x.astype(self.a.dtype), self.rate, self.key)
        thin = product.by(dropped, self.a)
        delta = self.scale * jnp.matmul(thin, self.b, precision=equations.precision(product.eqn))
        if self.m is None:
            return result, delta
        factor = self.magnification().reshape((1,) * (result.ndim - 1) + (-1,))
        base = result if self.key is None else product(dropped.astype(x.dtype), self.kernel)
        return result, (factor - 1) * base.astype(factor.dtype) + factor * delta.astype(factor.dtype)

    def _sum(self) -> jax.Array:
        delta = self.scale * jnp.matmul(self.a, self.b, precision="highest")
        delta = jnp.swapaxes(delta, -1, -2) if self.out_in else delta
        kernel: jax.Array = used(self.kernel)
        return kernel + delta.astype(kernel.dtype)

    def magnification(self) -> jax.Array:
        """Return m / ‖V‖, where the norms are a constant to the gradient."""
        if self.factor is not None:
            return self.factor
        with autocast_disabled():
            norms = _column_norms(lax.stop_gradient(self._sum()), self.out_in, self.m.dtype)
        return self.m / norms


@jax.jit
def _factor(kernel: _Adapted) -> jax.Array:
    """Return m / ‖V‖ of a kernel, or of a stack layer by layer."""
    found: jax.Array = kernel.magnification() if kernel.m.ndim == 1 else lax.map(_Adapted.magnification, kernel)
    return found


def _column_norms(kernel: Any, out_in: bool, dtype: Any) -> jax.Array:
    """Return the norms [..., out] of the columns of [..., in, out]."""
    return jnp.sqrt(jnp.square(used(kernel).astype(dtype)).sum(-1 if out_in else -2))


def _with_adapters(params: Any, adapters: Any, config: LoraConfig, rng: jax.Array | None) -> Any:
    """Return `params` with an `_Adapted` for every kernel that has adapters, and what is trained itself."""
    parts = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(adapters)}
    unplaced, names = set(parts), iter(range(len(parts)))

    def leaf(path: Any, kernel: Any) -> Any:
        name = path_name(path)
        if name in parts:
            unplaced.discard(name)
            return _checked_copy(name, kernel, parts[name])
        own = [f"{name}/{part}" for part in ("abm" if config.dora else "ab")]
        if not unplaced.issuperset(own):
            return kernel
        unplaced.difference_update(own)
        a, b, *m = map(parts.__getitem__, own)
        out_in = config.is_out_in(name)
        _check_fits(name, kernel, a, b, out_in)
        key = None if rng is None or config.dropout == 0.0 else jax.random.fold_in(rng, next(names))
        if key is not None and a.ndim > 2:
            key = jax.random.split(key, a.shape[0])
        return _Adapted(kernel, a, b, m[0] if m else None, key, name, config.scale, config.dropout, out_in)

    tree = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_form)
    if unplaced:
        raise UserError(f"the adapters {sorted(unplaced)} match no kernel: use the model they belong to")
    return tree


def _in_out(shape: Sequence[int], out_in: bool) -> tuple[int, ...]:
    """Return the shape of a kernel or of a stack as [..., in, out]."""
    *layers, n, m = shape
    return (*layers, m, n) if out_in else (*layers, n, m)


def _checked_copy(name: str, original: Any, copy: Any) -> Any:
    if copy.shape != original.shape:
        raise UserError(f"{name} {list(original.shape)} is trained as {list(copy.shape)}: use the model it belongs to")
    return copy.astype(original.dtype)


def _check_fits(name: str, kernel: Any, a: Any, b: Any, out_in: bool) -> None:
    *layers, n, m = _in_out(kernel.shape, out_in)
    if a.shape != (*layers, n, a.shape[-1]) or b.shape != (*layers, a.shape[-1], m):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise UserError(f"the adapters of {name} {list(kernel.shape)} are {shapes}: use the model they belong to")


def _targets(params: Any, config: LoraConfig) -> list[tuple[str, Any]]:
    """Return (path, kernel) of the targeted kernels."""
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_form)]
    found = [(path, leaf) for path, leaf in named if re.fullmatch(config.targets, path)]
    if not found:
        kernels = ", ".join(path for path, leaf in named if len(leaf.shape) > 1)
        raise UserError(f"LoRA targets {config.targets!r} match no whole path: the model has {kernels}")
    for path, leaf in found:
        if len(leaf.shape) not in (2, 3) or path.rpartition("/")[2] in ("bias", "scale"):
            what = f"{path} {list(leaf.shape)}, which is not the kernel of a linear layer"
            raise UserError(f"LoRA targets {config.targets!r} match {what}: exclude it")
    return found
