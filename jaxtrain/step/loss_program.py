"""The loss computation of a step: a loss_fn and the passes that its program goes through."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtrain.cpu.products import cpu_products, loop_convolutions
from jaxtrain.passes import (
    Groups,
    Hook,
    KernelCopies,
    Policy,
    Whole,
    add_hooks,
    convert_where_used,
    fuse_casts,
    fuse_slices,
    lookup_gradients,
    overwrite_logits,
    partial_gradients,
    remat,
    save_costly,
    split_products,
    unfilled_stacks,
    unroll,
    used_dtypes,
    with_copies,
)
from jaxtrain.passes.pipeline import BEFORE_GRAD, Rewrite, applied
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.step.objective import Compute, LossFn, losses_in_float32, validated
from jaxtrain.step.probes import NO_PROBES, Probes


class Copies(NamedTuple):
    """Copies of parameters for a window, in which they do not change.

    Attributes:
      gathered: What `gather` returned; None if there is nothing to keep.
      kernels: Kernels in 8 bits; None if there are none.
    """

    gathered: Any = None
    kernels: KernelCopies | None = None


NO_COPIES = Copies()
Gather = Callable[[Any, Any], Any]
"""`gather(params, dtypes)` gathers parameters in these dtypes; None for those that every device has already."""


def identity(compute: Compute) -> Compute:
    """Leave the program as it is."""
    return compute


class LossProgram(NamedTuple):
    """A loss_fn with the options of its program.

    Attributes:
      loss_fn: The user's function.
      policy: Precision policy.
      hooks: Gradient hooks by parameter path or `checkpoint_name`.
      frozen: Predicate on the paths of parameters that are not trained.
      unroll: Whether scanned layers are compiled one by one.
      remat: Rematerialization policy.
      constrain: Adds the sharding constraints of a mesh; the identity on one device.
      platform: The platform that the program is compiled for; None for that of the default backend.
      groups: Groups of rows whose gradients are summed once a window; None to sum over all rows at once.
      lookups: Groups of rows for the tables of a window of one micro-batch; None to sum over all rows at once.
      gather: Gathers the parameters of which every device keeps a copy for the window; None to keep none.
      whole: Returns a sharding without the axes over which parameters are gathered; None if none are.
      observe: Adds functions that observe values; the identity in a training step.
    """

    loss_fn: LossFn
    policy: Policy
    hooks: Mapping[str, Hook] = MappingProxyType({})
    frozen: Frozen = none_frozen
    unroll: bool = False
    remat: str = "none"
    constrain: Callable[[Compute], Compute] = identity
    platform: str | None = None
    groups: Groups | None = None
    lookups: Groups | None = None
    gather: Gather | None = None
    whole: Whole | None = None
    observe: Callable[[Compute], Compute] = identity

    @property
    def is_on_mesh(self) -> bool:
        """Whether the program is one for a mesh."""
        return self.constrain is not identity

    def numerics(
        self, scales: Any = None, probes: Any = None, kernels: KernelCopies | None = None
    ) -> dict[str, Rewrite]:
        """Return the first passes, which decide the dtype of every operation."""
        precision = partial(
            self.policy.apply,
            state_argnums=(3,),
            batch_argnums=(1,),
            scales=scales,
            probes=probes,
            kernels=kernels,
            whole=self.whole,
        )
        return {**self._before_precision, "precision": precision}

    @property
    def _before_precision(self) -> dict[str, Rewrite]:
        return {
            "check": partial(validated, differentiable=True),
            **({"constraints": self.constrain} if self.is_on_mesh else {}),
            **({"hooks": partial(add_hooks, hooks=self.hooks)} if self.hooks else {}),
        }

    def rewrites(
        self, copies: Copies = NO_COPIES, scales: Probes = NO_PROBES, probes: Probes = NO_PROBES
    ) -> dict[str, Rewrite]:
        """Return the passes of `jaxtrain.passes.pipeline.BEFORE_GRAD` that the program goes through."""
        found = self.numerics(scales.products, probes.products, copies.kernels)
        if self.observe is not identity:
            found["observe"] = self.observe
        if copies.gathered is not None:
            found["copies"] = partial(with_copies, copies=copies.gathered)
        if self.groups is not None:
            found["partial_gradients"] = partial_gradients
        if self.lookups is not None:
            found["lookup_gradients"] = partial(lookup_gradients, groups=self.lookups)
        if scales.scaler is not None:
            found["scale_blocks"] = scales.scaler.rewrite(probes.scaler, self.frozen)
        if self.unroll:
            found["unroll"] = partial(unroll, platform=self.platform, on_mesh=self.is_on_mesh)
        if self.remat != "none":
            found["remat"] = partial(remat, policy=self.remat, platform=self.platform)
        else:
            found["save_costly"] = partial(save_costly, platform=self.platform)
        if not self.is_on_mesh:
            # On a mesh parts of a sharded weight would be gathered, and the compiler pipelines only loops that are
            # written as JAX writes them.
            for name, rewrite in _ON_ONE_DEVICE.items():
                found[name] = partial(rewrite, platform=self.platform)
        found["cpu_products"] = partial(cpu_products, platform=self.platform)
        found["stored"] = partial(convert_where_used, dtype=self.policy.param_dtype)
        found["losses_in_float32"] = losses_in_float32
        return found

    def of_gradient(self, *, in_loop: bool) -> dict[str, Rewrite]:
        """Return the passes of `jaxtrain.passes.pipeline.AFTER_GRAD` that the gradient of a micro-batch goes through.

        Args:
          in_loop: Whether the loop over a window's micro-batches computes it.
        """
        found: dict[str, Rewrite] = {}
        if in_loop:
            found["loop_convolutions"] = partial(loop_convolutions, platform=self.platform)
        if self.policy.fp8 is not None:
            found["fuse_casts"] = partial(fuse_casts, platform=self.platform)
        if not self.is_on_mesh:
            found["unfilled_stacks"] = partial(unfilled_stacks, platform=self.platform)
        return found

    def compute(self, copies: Copies = NO_COPIES, scales: Probes = NO_PROBES, probes: Probes = NO_PROBES) -> Compute:
        """Return the transformed loss_fn, `compute(params, batch, rng, model_state)`.

        Args:
          copies: What `copies` returned for the parameters.
          scales: The scales that the passes read.
          probes: Zeros by which the gradient is what the passes observe.
        """
        return applied(BEFORE_GRAD, self.rewrites(copies, scales, probes), self.loss_fn)

    def copies(self, scales: Any, params: Any, *rest: Any) -> Copies:
        """Return copies of the parameters for a window.

        Kernels of products in 8 bits, and gathered copies in the dtypes in which `compute(params, …)` uses parameters.

        Args:
          scales: The delayed scales of products in 8 bits; None without any.
          params: The parameters.
          *rest: The other arguments of `compute`, of one micro-batch.
        """
        kernels = self.kernels(scales, params, *rest)
        if self.gather is None:
            return Copies(kernels=kernels)
        return Copies(self.gather(params, self.used_dtypes(scales, kernels, params, *rest)), kernels)

    def kernels(self, scales: Any, params: Any, *rest: Any) -> KernelCopies | None:
        """Return the kernels of products in 8 bits, with arguments as `copies`; None for a policy without them."""
        if self.policy.fp8 is None:
            return None
        are_whole = self.gather is not None
        options: dict[str, Any] = {"scales": scales, "whole": self.whole, "are_whole": are_whole}
        kernels = self.policy.kernels(
            applied(BEFORE_GRAD, self._before_precision, self.loss_fn),
            state_argnums=(3,),
            batch_argnums=(1,),
            **options,
        )
        return kernels(params, *rest)

    def with_numerics(self) -> Compute:
        """Return the loss_fn with the first transforms only."""
        return applied(BEFORE_GRAD, self.numerics(), self.loss_fn)

    def used_dtypes(self, scales: Any, kernels: KernelCopies | None, params: Any, *rest: Any) -> Any:
        """Return the dtypes in which `compute(params, …)` uses the parameters.

        None for tables that it looks up in, and for parameters that it uses in 8 bits only.
        """
        compute = applied(BEFORE_GRAD, self.numerics(scales, scales, kernels), self.loss_fn)
        return used_dtypes(compute)(params, *rest)


_ON_ONE_DEVICE = {"split_products": split_products, "overwrite_logits": overwrite_logits, "fuse_slices": fuse_slices}
"""Passes of a program for one device."""
