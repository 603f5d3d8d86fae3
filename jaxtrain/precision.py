"""Mixed precision by program transformation: named policies, and autocast over the jaxpr.

The lists are those of PyTorch's autocast for CUDA (`aten/src/ATen/autocast_mode.h`, AT_FORALL_LOWER_PRECISION_FP
and AT_FORALL_FP32), said in JAX's primitives. Master parameters stay in `param_dtype`; a model written in plain
float32 needs no change.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxtrain import jaxpr
from jaxtrain.errors import UserError

LOW_PRECISION = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Run in the compute dtype: matmul, linear, conv, bmm and their kin."""

FLOAT32 = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "pow", "integer_pow", "rsqrt"}  # exp … pow, rsqrt
    | {"acos", "asin", "cosh", "sinh", "tan", "erf_inv"}  # of the trigonometric ones, these alone are listed
    | {"reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp"}  # sum, prod, cumsum, cumprod, softmax
    # In no list of PyTorch's, which refuses them in low precision, as XLA does.
    | {"cholesky", "eig", "eigh", "fft", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd"}
    | {"triangular_solve", "tridiagonal", "tridiagonal_solve"}
)
"""Run in float32: exponentials, logarithms, powers and long sums, hence softmax, norms and losses; decompositions."""

# These read each operand's own dtype, so that widening one to another's would add conversions PyTorch has not.
_INDEPENDENT = frozenset({"sort", "gather", "dynamic_slice", "convert_element_type", "stop_gradient", "copy"})
_LOW_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclass(frozen=True)
class Policy:
    """The dtypes of a training step, and what a float32 matrix product means on hardware that has cheaper ones.

    `compute_dtype` None leaves the model's own dtypes alone. `matmul_precision` is JAX's
    (`jax.default_matmul_precision`): "highest" is PyTorch's default for float32 products on GPUs.
    """

    param_dtype: Any
    compute_dtype: Any = None
    matmul_precision: str = "highest"
    loss_scaling: bool = False

    def cast_params(self, params: Any) -> Any:
        """A copy of `params` with its floating leaves in `param_dtype`; others keep theirs.

        Raises `UserError` for float64 where JAX is not set to have any.
        """
        if jax.dtypes.canonicalize_dtype(self.param_dtype) != self.param_dtype:
            raise UserError("precision 'fp64' needs JAX's x64 mode: jax.config.update('jax_enable_x64', True)")
        return jax.tree.map(lambda x: jnp.array(x, self.param_dtype if _is_float(x) else None, copy=True), params)

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` computed as this policy says."""
        inner = fn if self.compute_dtype is None else autocast(fn, self.compute_dtype)

        def computed(*args: Any) -> Any:
            with jax.default_matmul_precision(self.matmul_precision):
                return inner(*args)

        return computed


POLICIES = {
    "fp64": Policy(np.float64),
    "fp32": Policy(np.float32),
    "tf32": Policy(np.float32, matmul_precision="tensorfloat32"),
    "bf16": Policy(np.float32, jnp.bfloat16, matmul_precision="default"),
    "fp16": Policy(np.float32, np.float16, matmul_precision="default", loss_scaling=True),
}


def policy(precision: str | Policy) -> Policy:
    """The policy of that name, or the one given.

    >>> policy("fp16").loss_scaling
    True
    """
    if isinstance(precision, Policy):
        return precision
    if precision not in POLICIES:
        raise UserError(f"precision {precision!r} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[precision]


def autocast(fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """`fn` with matrix products and convolutions in `dtype`, the `FLOAT32` list in float32, and every other
    operation in the widest dtype of its inputs, as `torch.autocast("cuda", dtype)` would run it.

    float64 is left alone. Scalars and literals do not widen. Loops keep the dtypes of their carries.

    >>> x = jnp.ones((2, 2))
    >>> autocast(lambda x: x @ x, jnp.bfloat16)(x).dtype.name
    'bfloat16'
    >>> autocast(lambda x: jnp.exp(x @ x), jnp.bfloat16)(x).dtype.name
    'float32'
    """

    def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        name = eqn.primitive.name
        args = [_weaken(v, x) for v, x in zip(eqn.invars, args, strict=True)]
        if name in jaxpr.HIGHER_ORDER:
            return jaxpr.HIGHER_ORDER[name](eqn, args, run)
        if name in LOW_PRECISION:
            return _bind_low(eqn, args, dtype)
        if name in FLOAT32:
            return jaxpr.bind(eqn, [_to(np.float32, x) if _is_low(x) else x for x in args])
        if name == "convert_element_type" and getattr(eqn.invars[0].aval, "dtype", None) == eqn.params["new_dtype"]:
            return args  # only strips a scalar of its weak type, in which a literal goes on not to widen
        if name in _INDEPENDENT:
            return jaxpr.bind(eqn, args)
        if name == "bitcast_convert_type" or jaxpr.inner_jaxprs(eqn):
            return jaxpr.as_traced(eqn, args)
        return jaxpr.bind(eqn, _widen(args))

    return jaxpr.transform(fn, rule)


def _bind_low(eqn: JaxprEqn, args: list[Any], dtype: Any) -> list[Any]:
    if not all(_is_low(x) for x in args):
        return jaxpr.as_traced(eqn, args)
    params = {**eqn.params, "preferred_element_type": np.dtype(dtype)}
    return [eqn.primitive.bind(*(_to(dtype, x) for x in args), **params)]


def _widen(args: list[Any]) -> list[Any]:
    """Floating `args` in the widest dtype among those with dimensions; failing these, among the scalars."""
    floats = [x for x in args if _is_float(x)]
    strong = [x for x in floats if not getattr(x, "weak_type", isinstance(x, float))]
    deciding = [x for x in strong if np.ndim(x)] or strong
    if not deciding:
        return args
    widest = functools.reduce(_wider, (x.dtype for x in deciding))
    return [_to(widest, x) if _is_float(x) else x for x in args]


def _wider(a: Any, b: Any) -> Any:
    # Neither of bfloat16 and float16 holds the other: both fit float32.
    return a if a == b else np.promote_types(np.promote_types(a, np.float32), b)


def _weaken(invar: Any, x: Any) -> Any:
    """A float literal as a Python number, so that neither it nor what is broadcast from it widens anything."""
    return float(x) if isinstance(invar, Literal) and _is_float(x) else x


def _to(dtype: Any, x: Any) -> Any:
    return x if getattr(x, "dtype", None) == dtype else lax.convert_element_type(x, dtype)


def _is_float(x: Any) -> bool:
    return isinstance(x, float) or jnp.issubdtype(getattr(x, "dtype", np.int32), np.floating)


def _is_low(x: Any) -> bool:
    return isinstance(x, float) or getattr(x, "dtype", None) in _LOW_FLOATS
