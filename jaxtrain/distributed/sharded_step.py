"""A training step on a mesh: the functions of `jaxtrain.step` with a constrained loss, jitted with shardings.

The program is the one for a single device, and the compiler partitions it. Loss scale, overflow checks, gradient norm,
weights of a window and dropout masks are therefore those of the whole batch by construction.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.constrained_loss import constrain_shardings
from jaxtrain.distributed.fresh_programs import bypass_compilation_cache, needs_fresh_programs
from jaxtrain.distributed.mesh import FSDP, PIPELINE, TENSOR
from jaxtrain.distributed.row_groups import lookup_groups, row_groups
from jaxtrain.distributed.rows import place_batch
from jaxtrain.distributed.sharding import Rules, gather, replicate_over, state_shardings
from jaxtrain.errors import UserError, user_facing
from jaxtrain.step import (
    LONGEST,
    CompilerOptions,
    Step,
    StepParts,
    TrainState,
    TrainStep,
    compiler_options,
    init_state,
    is_factory,
    limit_recompilation,
    mesh_gradient,
    takes_one_batch,
    window_step,
)


@user_facing
def shard(step: TrainStep, mesh: Mesh, rules: Rules | None = None) -> TrainStep:
    """Run a training step on a mesh, with the same interface and, up to rounding, the same numbers.

    `init` creates the state directly on its devices, from host arrays or from functions that create them; no device
    ever has all of it. Calls take batches [k·B, …] as `jaxtrain.distributed.place_batch` does.

    Args:
      step: The step for one device.
      mesh: The mesh.
      rules: `PartitionSpec`s of the parameters by path; None shards the longest axis of each over fsdp.

    Returns:
      A step whose states and batches are sharded over the mesh.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxtrain import Loss, train_step
      >>> from jaxtrain.distributed import make_mesh
      >>> def loss_fn(params, batch, rng):
      ...     return Loss(((batch["x"] @ params - 1) ** 2).sum(), weight=len(batch["x"])), {}
      >>> step = shard(train_step(loss_fn, optax.sgd(0.1), accumulate=2), make_mesh("fsdp=1", jax.devices()[:1]))
      >>> state = step.init(jnp.zeros(4))
      >>> state, metrics = step(state, {"x": jnp.ones((4, 4))})
      >>> state.params.sharding.spec, float(metrics["loss"])
      (P('fsdp',), 1.0)
    """
    if rules is None and mesh.shape.get(TENSOR, 1) > 1:
        raise UserError(
            f"mesh axis tensor={mesh.shape[TENSOR]} divides nothing without sharding rules, and repeats work on its "
            "devices: give rules, or use data or fsdp"
        )
    return ShardedStep(step, mesh, rules)


class ShardedStep(TrainStep):
    """A `TrainStep` with states and batches sharded over a mesh. `jitted` takes windows returned by `place`."""

    def __init__(self, step: TrainStep, mesh: Mesh, rules: Rules | None) -> None:
        self._mesh, self._rules = mesh, rules
        constrain = partial(constrain_shardings, mesh=mesh, rules=rules, accumulate=step.parts.options.accumulate)
        has_pipeline = mesh.shape.get(PIPELINE, 1) > 1
        super().__init__(
            step.parts.constrained(
                constrain,
                mesh.devices.flat[0].platform,
                _pipelined(step.parts, mesh, rules, constrain) if has_pipeline else mesh_gradient,
                row_groups(mesh, rules, step.parts.options.gradient_sums),
                lookup_groups(mesh, rules, step.parts.options.accumulate),
                None if step.parts.options.reshard_after == "forward" else partial(gather, mesh=mesh, rules=rules),
                None if has_pipeline else partial(replicate_over, replicated=(FSDP,)),
                divides_layers=has_pipeline,
            ),
        )
        self.jitted = self._jit(partial(window_step, self.parts), "state", "batch", accumulate=self._accumulate)

    def _jit(self, step: Step, *names: str, accumulate: int = 1) -> Any:
        limited = limit_recompilation(step, names, self.parts.options.allow_recompile)
        shardings = partial(state_shardings, mesh=self._mesh, rules=self._rules)
        return _Jitted(limited, shardings, self._mesh, self._options(accumulate))

    @property
    def compiler_options(self) -> CompilerOptions | None:
        """As `TrainStep.compiler_options`."""
        return self._options(self._accumulate)

    @property
    def _accumulate(self) -> int:
        return 1 if callable(self.parts.options.accumulate) else self.parts.options.accumulate

    def _options(self, accumulate: int) -> CompilerOptions | None:
        return compiler_options(
            deterministic=self.parts.options.deterministic,
            platform=self._mesh.devices.flat[0].platform,
            devices=self._mesh.size,
            # The loop over the micro-batches of a pipeline is a scan.
            pipelines_layers=accumulate == 1 or (accumulate <= LONGEST and not self.parts.divides_layers),
            unrolled=self.parts.loss.unroll,
            fp8=self.parts.loss.policy.fp8 is not None,
        )

    @user_facing
    def init(
        self, params: Any, *, model_state: Any = None, seed: int = 0, streaming: bool = False, donate: bool = False
    ) -> TrainState:
        """As `TrainStep.init`, with parameters and state sharded from the start."""
        shapes = self.shapes(params, model_state=model_state, seed=seed, streaming=streaming)
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        init = partial(init_state, self.parts, seed=seed, streaming=streaming, donate=donate)
        with bypass_compilation_cache(self._mesh):
            # What a function creates belongs to the state: a copy would need its memory twice.
            donated = [i for i, tree in enumerate((params, model_state)) if donate or is_factory(tree)]
            params = _on_devices(params, shardings.params)
            model_state = _on_devices(model_state, shardings.model_state)
            state: TrainState = jax.jit(init, out_shardings=shardings, donate_argnums=donated)(params, model_state)
        return state

    @user_facing
    def shapes(self, params: Any, *, model_state: Any = None, seed: int = 0, streaming: bool = False) -> TrainState:
        """As `TrainStep.shapes`, each with its sharding."""
        shapes = super().shapes(params, model_state=model_state, seed=seed, streaming=streaming)
        shardings = state_shardings(shapes, self._mesh, self._rules)
        with_sharding: TrainState = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
        )
        return with_sharding

    def place(self, batch: Any) -> Any:
        """Place a batch [k·B, …] on the mesh as the window that `jitted` takes."""
        return place_batch(batch, self._mesh, self._accumulate)

    @user_facing
    def compile(self, state: TrainState, batch: Any) -> Any:
        """As `TrainStep.compile`."""
        with bypass_compilation_cache(self._mesh):
            return self.jitted.lower(state, self.place(batch)).compile()

    @takes_one_batch
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """As `TrainStep.__call__`; the metrics are replicated."""
        return self._call(lambda state, batch: self.jitted(state, self.place(batch)), state, batch)

    @takes_one_batch
    def micro(self, state: TrainState, micro_batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """As `TrainStep.micro`."""
        if self.parts.divides_layers:
            raise UserError("step.micro cannot fill a pipeline, which needs a window: call the step with all its rows")
        return self._call(lambda state, batch: self._micro(state, place_batch(batch, self._mesh)), state, micro_batch)


def _pipelined(parts: StepParts, mesh: Mesh, rules: Rules | None, constrain: Callable[..., Any]) -> Callable[..., Any]:
    """Return how a window passes through the mesh axis pipeline, `StepParts.window`."""
    from jaxtrain.labs.pipeline import pipelined

    return pipelined(parts, mesh, rules, constrain)


class _Jitted:
    """`jax.jit` of a function of a state and a batch, with shardings derived from the structure of the state."""

    def __init__(
        self,
        function: Callable[..., Any],
        shardings: Callable[[Any], Any],
        mesh: Mesh,
        options: CompilerOptions | None,
    ) -> None:
        self._function, self._shardings, self._mesh, self._options = function, shardings, mesh, options
        self._by_kind: dict[Any, Any] = {}
        self._compiled: set[Any] = set()

    def __call__(self, state: TrainState, *batch: Any) -> Any:
        function = self._of(state, batch)
        if not needs_fresh_programs(self._mesh) or (kind := _kind((state, batch))) in self._compiled:
            return function(state, *batch)
        with bypass_compilation_cache(self._mesh):
            new = function(state, *batch)
        self._compiled.add(kind)
        return new

    def lower(self, state: TrainState, *batch: Any) -> Any:
        """As that of `jax.jit`."""
        return self._of(state, batch).lower(state, *batch)

    def _of(self, state: TrainState, batch: tuple[Any, ...]) -> Any:
        leaves, structure = jax.tree.flatten(state)
        kind = (structure, *(x.shape for x in leaves))
        if kind not in self._by_kind:
            shardings = self._shardings(state)
            self._by_kind[kind] = jax.jit(
                self._function,
                # A batch is where `place_batch` has put it.
                in_shardings=(shardings, *[None] * len(batch)),
                out_shardings=(shardings, NamedSharding(self._mesh, P())),
                donate_argnums=0,
                compiler_options=self._options,
            )
        return self._by_kind[kind]


def _kind(arguments: Any) -> Any:
    """Return a key that differs whenever `jax.jit` compiles another program."""
    leaves, structure = jax.tree.flatten(arguments)
    return (structure, *((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves))


def _on_devices(tree: Any, shardings: Any) -> Any:
    """Place a tree of arrays, or the result of a function that creates one, with these shardings."""
    return jax.jit(tree, out_shardings=shardings)() if is_factory(tree) else jax.device_put(tree, shardings)
