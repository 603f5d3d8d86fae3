"""Named precision policies: the dtypes of a computation."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.passes.fp8.delayed_scales import DelayedScales, init_scales, next_scales
from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.kernels import KernelCopies, fp8_products, kernel_copies
from jaxtrain.passes.fp8.quantized_kernel import Whole
from jaxtrain.passes.numerics.autocast import autocast, autocast_disabled
from jaxtrain.passes.numerics.casts import LOWER_FLOATS, is_array, is_float, to_dtype
from jaxtrain.passes.numerics.exact_batch import exact_batch
from jaxtrain.passes.numerics.low_compute import compute_in
from jaxtrain.passes.numerics.stored import is_stored_low


@dataclass(frozen=True)
class Policy:
    """The dtypes of a computation, and the precision of float32 matrix products on hardware with cheaper ones.

    Policies compose: a function under one policy keeps it inside a computation under another.
    `dataclasses.replace` creates variants.

    Attributes:
      param_dtype: Dtype of the trained parameters and, without `compute_dtype`, of the computation.
      compute_dtype: Dtype to autocast to; None computes in `param_dtype`, as the code is written.
      cast_inputs: Whether all of the function is computed in `compute_dtype`, its inputs converted to it first as with
        `model.to(compute_dtype)`, instead of autocast.
      matmul_precision: As for `jax.default_matmul_precision`; "highest" is PyTorch's default for float32 products on
        GPUs.
      loss_scaling: Whether `train_step` scales the loss by default.
      fp8: How products with a parameter are computed in 8 bits; None computes them in `compute_dtype`, as all others.
        The parameters are the first argument of the function that the policy is applied to.
      param_rounding: How `train_step` rounds updated bfloat16 parameters: to "nearest"; "stochastic", up or down with
        the probabilities by which the expectation is exact; or "kahan", to nearest with what was lost added to the next
        update.

    Raises:
      UserError: `fp8` without a `compute_dtype`; `param_rounding` is unknown, or is not "nearest" for parameters that
        are not bfloat16.

    Example:
      >>> x = jnp.ones((2, 2))
      >>> head = POLICIES["fp32"].apply(lambda x: x @ x)
      >>> body_and_head = POLICIES["bf16"].apply(lambda x: (x @ x, head(x)))
      >>> [y.dtype.name for y in body_and_head(x)]
      ['bfloat16', 'float32']
    """

    param_dtype: Any
    compute_dtype: Any = None
    cast_inputs: bool = False
    matmul_precision: str = "highest"
    loss_scaling: bool = False
    fp8: Fp8 | None = None
    param_rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.fp8 is not None and self.compute_dtype is None:
            raise UserError("a policy with fp8 needs a compute_dtype for all other operations: use jnp.bfloat16")
        if self.param_rounding not in ("nearest", "stochastic", "kahan"):
            raise UserError(
                f"param_rounding must be 'nearest', 'stochastic' or 'kahan', got {self.param_rounding!r}: use 'nearest'"
            )
        dtype = jnp.dtype(self.param_dtype)
        if self.param_rounding != "nearest" and dtype != jnp.bfloat16:
            raise UserError(
                f"param_rounding {self.param_rounding!r} is for bfloat16 parameters, got param_dtype {dtype.name}: "
                f"use precision 'bf16_params_{self.param_rounding}', or param_rounding 'nearest'"
            )

    def cast_params(self, params: Any, *, copy: bool = True) -> Any:
        """Copy parameters or model state, converting floating-point leaves to `param_dtype`.

        Args:
          params: Pytree of arrays.
          copy: Whether to copy arrays that have their dtype already.

        Returns:
          The copy; other leaves keep their dtypes, but for complex64, which is complex128 beside float64.

        Raises:
          UserError: `param_dtype` is float64 and JAX's x64 mode is off.
        """
        self._check_available()
        return jax.tree.map(lambda x: jnp.array(x, self._dtype(x), copy=copy), params)

    def cast_frozen(self, params: Any, *, copy: bool = True) -> Any:
        """Copy parameters that are not trained: as `cast_params`, but bfloat16 and float16 leaves keep their dtypes.

        There is nothing to add to them, so that they need no copy in a wider `param_dtype`.
        """
        self._check_available()
        return jax.tree.map(lambda x: jnp.array(x, self._stored_dtype(x), copy=copy), params)

    def _stored_dtype(self, x: Any) -> Any:
        return None if is_stored_low(x, self.param_dtype) else self._dtype(x)

    def _dtype(self, x: Any) -> Any:
        if jnp.iscomplexobj(x):
            return np.promote_types(jnp.result_type(x), self.param_dtype)
        return self.param_dtype if is_float(x) else None

    def apply(
        self,
        fn: Callable[..., Any],
        *,
        state_argnums: Collection[int] = (),
        batch_argnums: Collection[int] = (),
        scales: Any = None,
        probes: Any = None,
        kernels: KernelCopies | None = None,
        whole: Whole | None = None,
    ) -> Callable[..., Any]:
        """Apply the policy to a function.

        Args:
          fn: A function of arrays.
          state_argnums: Positions of the arguments with model state, which `cast_inputs` leaves in their dtypes.
          batch_argnums: Positions of the arguments that are a batch: a low precision rounds them where products take
            them, and not in the arithmetic of a loss (`exact_batch`).
          scales: The scales of delayed scaling, as for `fp8_products`. Without them each operand is scaled by its own
            largest magnitude.
          probes: Zeros like `scales`.
          kernels: What `kernels` returned for the parameters; None to quantize kernels where they are used.
          whole: How kernels in 8 bits are gathered, as for `fp8_products`.

        Returns:
          The same function, computed under this policy.
        """
        inner = self._in_dtypes(fn, state_argnums, batch_argnums)
        if self.fp8 is not None:
            inner = fp8_products(inner, self.fp8, scales, probes, kernels, whole, (self.compute_dtype,))
        return self._in_matmul_precision(inner)

    def kernels(
        self,
        fn: Callable[..., Any],
        *,
        state_argnums: Collection[int] = (),
        batch_argnums: Collection[int] = (),
        scales: Any = None,
        whole: Whole | None = None,
        are_whole: bool = False,
    ) -> Callable[..., KernelCopies]:
        """Return a function of the arguments of `fn(params, …)` to its kernels in 8 bits, as `kernel_copies`.

        Args:
          fn: The function to which the policy, one with `fp8`, is to be applied.
          state_argnums: As for `apply`.
          batch_argnums: As for `apply`.
          scales: As for `apply`.
          whole: As for `apply`.
          are_whole: Whether to gather the kernels from other devices.
        """
        assert self.fp8 is not None
        inner = self._in_dtypes(fn, state_argnums, batch_argnums)
        copies = kernel_copies(inner, self.fp8, scales, whole, (self.compute_dtype,), are_whole=are_whole)
        return self._in_matmul_precision(copies)

    def _in_matmul_precision(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            with jax.default_matmul_precision(self.matmul_precision):
                return inner(*args, **kwargs)

        return compute

    def init_scales(self, params: Any) -> DelayedScales | None:
        """Return the scales of delayed scaling before the first update; None for a policy that remembers none."""
        return init_scales(self.fp8, params) if self.fp8 is not None and self.fp8.is_delayed else None

    def next_scales(self, scales: DelayedScales | None, amax: Any) -> DelayedScales | None:
        """Return the scales after an update, from the largest magnitudes of its window.

        They are those of skipped updates too.
        """
        return None if self.fp8 is None or scales is None else next_scales(self.fp8, scales, amax)

    def _in_dtypes(
        self, fn: Callable[..., Any], state_argnums: Collection[int], batch_argnums: Collection[int]
    ) -> Callable[..., Any]:
        if self.compute_dtype is None:
            return self._uncast(fn, batch_argnums)
        if self.cast_inputs:
            return compute_in(fn, self.compute_dtype, state_argnums, batch_argnums)
        return autocast(fn, self.compute_dtype)

    def _uncast(self, fn: Callable[..., Any], batch_argnums: Collection[int]) -> Callable[..., Any]:
        is_low = jnp.dtype(self.param_dtype) in LOWER_FLOATS
        exact = batch_argnums if is_low else ()
        inner = exact_batch(fn, self.param_dtype, exact) if exact else fn

        def compute(*args: Any, **kwargs: Any) -> Any:
            self._check_available()

            def cast(tree: Any) -> Any:
                return jax.tree.map(lambda x: to_dtype(self.param_dtype, x) if is_array(x) else x, tree)

            args = tuple(x if i in exact else cast(x) for i, x in enumerate(args))
            with autocast_disabled():
                return inner(*args, **cast(kwargs))

        return compute

    def _check_available(self) -> None:
        if jax.dtypes.canonicalize_dtype(self.param_dtype) != self.param_dtype:
            raise UserError("precision 'fp64' needs JAX's x64 mode: call jax.config.update('jax_enable_x64', True)")


POLICIES = {
    "fp64": Policy(np.float64),
    "fp32": Policy(np.float32),
    "tf32": Policy(np.float32, matmul_precision="tensorfloat32"),
    "bf16": Policy(np.float32, jnp.bfloat16),
    "fp16": Policy(np.float32, np.float16, loss_scaling=True),
    "bf16_compute": Policy(np.float32, jnp.bfloat16, cast_inputs=True),
    "bf16_params": Policy(jnp.bfloat16),
    "bf16_params_stochastic": Policy(jnp.bfloat16, param_rounding="stochastic"),
    "bf16_params_kahan": Policy(jnp.bfloat16, param_rounding="kahan"),
    "fp8": Policy(np.float32, jnp.bfloat16, fp8=Fp8()),
    "fp8_delayed": Policy(np.float32, jnp.bfloat16, fp8=Fp8("delayed")),
    # The recipe "rowwise" of torchao's `Float8LinearConfig.from_recipe_name`.
    "fp8_row": Policy(np.float32, jnp.bfloat16, fp8=Fp8("row", power_of_two_scales=True)),
    "fp8_block": Policy(np.float32, jnp.bfloat16, fp8=Fp8("block")),
}
"""Policies by name. Those that begin with "bf16_params" have no float32 parameters, as `model.bfloat16()`; the others
have master parameters, which "bf16_compute" converts to bfloat16 for the computation. "fp8", "fp8_row" and "fp8_block"
are "bf16" with 8-bit products."""


def policy(precision: str | Policy) -> Policy:
    """Return the policy of a name, or the policy itself.

    Raises:
      UserError: The name is unknown.

    Example:
      >>> policy("fp16").loss_scaling
      True
    """
    if isinstance(precision, Policy):
        return precision
    if precision not in POLICIES:
        raise UserError(f"precision {precision!r} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[precision]
