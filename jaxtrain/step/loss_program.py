"""The loss computation of a step: a loss_fn and the program transforms applied to it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtrain.cpu.products import cpu_products
from jaxtrain.passes import (
    Groups,
    Hook,
    KernelCopies,
    Policy,
    Stages,
    Whole,
    add_hooks,
    convert_where_used,
    fuse_slices,
    lookup_gradients,
    overwrite_logits,
    partial_gradients,
    remat,
    save_costly,
    scale_blocks,
    split_products,
    unroll,
    used_dtypes,
    with_copies,
)
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


class RowDivision(NamedTuple):
    """How devices divide rows.

    Attributes:
      constrain: Adds the sharding constraints.
      groups: The groups of rows whose gradients are summed once a window.
    """

    constrain: Callable[[Compute], Compute]
    groups: Groups


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
      stages: Stages of a pipeline that a window's micro-batches pass through; None for no pipeline.
      of_head: How the stages divide the rows of what follows the layers; None if each computes all of it.
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
    stages: Stages | None = None
    of_head: RowDivision | None = None
    observe: Callable[[Compute], Compute] = identity

    @property
    def is_on_mesh(self) -> bool:
        """Whether the program is one for a mesh."""
        return self.constrain is not identity

    def numerics(
        self, scales: Any = None, probes: Any = None, kernels: KernelCopies | None = None
    ) -> list[Callable[..., Any]]:
        """Return the first transforms, in order of application; they decide the dtype of every operation."""
        return [
            *self._before_the_policy,
            # Decides every operation's dtype; what follows only changes how operations are computed.
            partial(
                self.policy.apply,
                state_argnums=(3,),
                batch_argnums=(1,),
                scales=scales,
                probes=probes,
                kernels=kernels,
                whole=self.whole,
            ),
        ]

    @property
    def _before_the_policy(self) -> list[Callable[..., Any]]:
        return [
            # Innermost, so that an error about the loss_fn's result names what the loss_fn itself returned.
            partial(validated, differentiable=True),
            # Before any cast: the mesh recognizes parameters by identity.
            self.constrain,
            # Before autocast, so that a parameter's hook receives the float32 gradient, as in PyTorch.
            partial(add_hooks, hooks=self.hooks),
        ]

    def transforms(
        self, copies: Copies = NO_COPIES, scales: Probes = NO_PROBES, probes: Probes = NO_PROBES
    ) -> list[Callable[..., Any]]:
        """Return the transforms in order of application: each rewrites the program of all before it."""
        return [
            *self.numerics(scales.products, probes.products, copies.kernels),
            # After autocast, whose roundings it observes.
            self.observe,
            # After autocast, in whose dtypes the copies are.
            identity if copies.gathered is None else partial(with_copies, copies=copies.gathered),
            # After autocast, whose products it differentiates group by group.
            identity if self.groups is None else partial(partial_gradients, groups=self.groups),
            identity if self.lookups is None else partial(lookup_gradients, groups=self.lookups),
            # After autocast, which chooses the products. On a mesh, parts of a sharded weight would be gathered.
            identity if self.is_on_mesh else partial(split_products, platform=self.platform),
            identity if self.is_on_mesh else partial(overwrite_logits, platform=self.platform),
            # After the sums over groups, which are operands of blocks; before the blocks are unrolled and checkpointed.
            identity
            if scales.blocks is None
            else partial(scale_blocks, scales=scales.blocks, probes=probes.blocks, frozen=self.frozen),
            # After autocast, which preserves the dtypes of a scan's carry: unrolling changes no number.
            partial(unroll, platform=self.platform, on_mesh=self.is_on_mesh) if self.unroll else identity,
            # After autocast, whose low-precision products it rewrites; their gradients follow the rewritten form.
            partial(cpu_products, platform=self.platform),
            # After all rewriting of operations, so that a policy chooses among the products that really run.
            partial(remat, policy=self.remat, platform=self.platform)
            if self.remat != "none"
            else partial(save_costly, platform=self.platform),
            # After the checkpoints of blocks, which may be of other values: remat reads the blocks as they are written.
            # On a mesh the compiler pipelines only loops that are written as JAX writes them.
            identity if self.is_on_mesh else partial(fuse_slices, platform=self.platform),
            # After all other rewriting, so that a product in low precision reads frozen parameters as they are stored.
            partial(convert_where_used, dtype=self.policy.param_dtype),
            # Outermost: sums are widened before they are divided, scaled or added.
            losses_in_float32,
        ]

    def compute(self, copies: Copies = NO_COPIES, scales: Probes = NO_PROBES, probes: Probes = NO_PROBES) -> Compute:
        """Return the transformed loss_fn, `compute(params, batch, rng, model_state)`.

        Args:
          copies: What `copies` returned for the parameters.
          scales: The scales that the passes read.
          probes: Zeros by which the gradient is what the passes observe.
        """
        return self._applied(self.transforms(copies, scales, probes))

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
            self._applied(self._before_the_policy), state_argnums=(3,), batch_argnums=(1,), **options
        )
        return kernels(params, *rest)

    def with_numerics(self) -> Compute:
        """Return the loss_fn with the first transforms only."""
        return self._applied(self.numerics())

    def used_dtypes(self, scales: Any, kernels: KernelCopies | None, params: Any, *rest: Any) -> Any:
        """Return the dtypes in which `compute(params, …)` uses the parameters.

        None for tables that it looks up in, and for parameters that it uses in 8 bits only.
        """
        return used_dtypes(self._applied(self.numerics(scales, scales, kernels)))(params, *rest)

    def _applied(self, transforms: Sequence[Callable[..., Any]]) -> Any:
        return reduce(lambda compute, transform: transform(compute), transforms, self.loss_fn)
