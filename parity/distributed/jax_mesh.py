"""A training run through `jaxtrain.distributed.shard`, recorded under PyTorch's names."""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain
from jaxtrain.distributed import bypass_compilation_cache, is_first, local_rows, make_mesh, process_group, shard
from jaxtrain.step import current_scale
from parity.case import Batch
from parity.distributed.mesh_training import Training
from parity.distributed.process_calls import free_port, in_processes
from parity.oracle.in_jax import in_float64
from parity.record import Record
from parity.sides.jax_side import from_torch, observe, record_gradients
from parity.sides.torch_side import initial_weights


def run(training: Training, devices: Sequence[Any] | None = None) -> Record:
    """Train on a mesh of `devices`, by default those of all processes; every process must call it."""
    # Strict promotion rejects a model's float32 constants in float64.
    mesh = make_mesh(training.mesh, devices)
    double = jax.enable_x64(training.precision == "fp64")
    with bypass_compilation_cache(mesh), double, jax.numpy_dtype_promotion("standard"):
        return _run(training, mesh)


def run_in_processes(trainings: Sequence[Training], processes: int, devices_per_process: int) -> list[Record]:
    """Run trainings, one after another, in several processes with virtual CPU devices, and return their records.

    The processes connect as those of `jaxtrain launch` do.
    """
    common = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_NUM_CPU_DEVICES": str(devices_per_process),
        "JAX_PLATFORMS": "cpu",
        # Without the virtual devices of this process.
        "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")),
    }
    environments = [{**common, "JAX_PROCESS_ID": str(i)} for i in range(processes)]
    records: list[Record] = in_processes(partial(_process, trainings), environments)
    return records


def _process(trainings: Sequence[Training]) -> list[Record] | None:
    with process_group():
        records = [run(training) for training in trainings]
        return records if is_first() else None


def _run(training: Training, mesh: Mesh) -> Record:
    case, k, precision = training.case(), training.accumulate, training.precision
    step = jaxtrain.train_step(
        in_float64(case.loss_fn) if precision == "fp64" else case.loss_fn,
        optax.chain(record_gradients(), case.optimizer.jax),
        precision=precision,
        accumulate=k,
        clip_norm=case.clip_norm,
        loss_scale=None if training.scaling is None else jaxtrain.dynamic_loss_scale(**asdict(training.scaling)),
    )
    step = shard(step, mesh, training.rules)
    params, model_state = from_torch(case, initial_weights(case, training.seed))
    state = step.init(params, model_state=_in_precision(model_state, precision), seed=training.seed)
    # No process could read an array that is sharded over processes.
    whole = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))
    losses, norms, scales = [], [], [float(current_scale(state.loss_scale))]
    first = None

    for batch in case.batches(training.seed, training.steps):
        state, metrics = step(state, _own_rows(batch, mesh, k, precision))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        scales.append(float(current_scale(state.loss_scale)))
        if first is None and metrics["applied"]:
            first = observe(case, whole(state))

    last = observe(case, whole(state))
    grads, after_first = first or last
    return Record(np.array(losses), grads, after_first, last[1], np.array(scales), np.array(norms))


def _own_rows(batch: Batch, mesh: Mesh, accumulate: int, precision: str) -> Any:
    """The rows that this process supplies."""
    rows = local_rows(mesh, len(next(iter(batch.values()))), accumulate)
    return _in_precision({name: x[rows] for name, x in batch.items()}, precision)


def _in_precision(tree: Any, precision: str) -> Any:
    """`tree` as NumPy arrays: floating ones in float32, or float64 for fp64, others in int32."""
    dtype = np.float64 if precision == "fp64" else np.float32
    return jax.tree.map(lambda x: np.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else np.int32), tree)
