"""The reference: a training script as PyTorch's users write it for `torchrun`, one process for each device of the mesh.

It always runs on the CPU over gloo, so that the reference is the same on every machine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Module, ModuleList
from torch.nn.parallel import DistributedDataParallel

from jaxtrain.distributed import DATA, DCN, FSDP, data_parallel_size, parse_mesh
from parity.case import Batch, Case
from parity.distributed.mesh_training import Scaling, Training
from parity.distributed.process_calls import free_port, in_processes
from parity.oracle.in_torch import InFloat64
from parity.record import Record
from parity.sides.torch_side import AUTOCAST, WHOLE, Updates, full_tensor, in_dtype, seeded_model, snapshot, tensor


def run(trainings: Sequence[Training]) -> list[Record]:
    """Run trainings one after another in the same processes and return the first rank's unsharded records.

    All meshes must have the same number of devices. `losses` and `grad_norms` are of the whole batch, buffers the
    rank's.
    """
    (ranks,) = {data_parallel_size(parse_mesh(training.mesh)) for training in trainings}
    # As `torchrun` sets them.
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    environments = [{**common, "RANK": str(rank)} for rank in range(ranks)]
    records: list[Record] = in_processes(partial(_rank, trainings), environments)
    return records


def _rank(trainings: Sequence[Training]) -> list[Record] | None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        records = [_train(training) for training in trainings]
        return records if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _train(training: Training) -> Record:
    case = training.case()
    with seeded_model(case, training.seed) as model:
        return _train_model(case, in_dtype(case, model, WHOLE.get(training.precision, torch.float32)), training)


def _train_model(case: Case, model: Module, training: Training) -> Record:
    k, precision = training.accumulate, training.precision
    called, accumulating = _distributed(model, training.mesh)
    optimizer = case.torch_optimizer(model)
    scheduler = None if case.optimizer.scheduler is None else case.optimizer.scheduler(optimizer)
    scaler = _scaler(training.scaling, precision)
    autocast = torch.autocast("cpu", AUTOCAST[precision]) if precision in AUTOCAST else nullcontext()
    # Without the scaler, whose kernels are float32.
    lifted = InFloat64 if precision == "fp64" else nullcontext
    updates = Updates(case, model, optimizer)
    losses, norms, scales = [], [], [scaler.get_scale()]

    for batch in case.batches(training.seed, training.steps):
        optimizer.zero_grad()
        window_loss = torch.zeros([])
        for i, micro_batch in enumerate(_own_rows(batch, k, precision)):
            # Gradients are exchanged after the last micro-batch only.
            with accumulating(i < k - 1):
                with autocast, lifted():
                    total, weight = case.torch_loss(called, micro_batch)
                    loss = total / weight / k
                scaled = scaler.scale(loss)
                with lifted():
                    scaled.backward()
            window_loss = window_loss + loss.detach()
        scaler.unscale_(optimizer)
        bound = math.inf if case.clip_norm is None else case.clip_norm
        norms.append(full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), bound)).item())
        applied = updates.count
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None and updates.count > applied:
            scheduler.step()
        dist.all_reduce(window_loss)
        losses.append(window_loss.item() / dist.get_world_size())
        scales.append(scaler.get_scale())

    last = snapshot(case, model, optimizer)
    first = updates.first or last
    return Record(np.array(losses), updates.grads, first, last, np.array(scales), np.array(norms))


def _scaler(scaling: Scaling | None, precision: str) -> torch.amp.GradScaler:
    given = scaling or Scaling()
    enabled = precision == "fp16" or scaling is not None
    return torch.amp.GradScaler("cpu", given.init_scale, growth_interval=given.growth_interval, enabled=enabled)


def _distributed(model: Module, mesh: str) -> tuple[Module, Callable[[bool], AbstractContextManager[None]]]:
    """The wrapped model, and the context of a micro-batch that is not the last of its window."""
    shape = parse_mesh(mesh)
    if shape[FSDP] == 1:
        ddp = DistributedDataParallel(model)
        return ddp, lambda more: ddp.no_sync() if more else nullcontext()

    replicas = shape[DCN] * shape[DATA]
    sizes, names = ((replicas, shape[FSDP]), (DATA, FSDP)) if replicas > 1 else ((shape[FSDP],), (FSDP,))
    devices = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    # One group of parameters per layer and one of the rest, as in PyTorch's examples.
    # Inner modules first: the outer ones take the remaining parameters.
    for layers in reversed([module for module in model.modules() if isinstance(module, ModuleList)]):
        for layer in layers:
            fully_shard(layer, mesh=devices)
    sharded = fully_shard(model, mesh=devices)

    def accumulating(more: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(not more)
        return nullcontext()

    return model, accumulating


def _own_rows(batch: Batch, accumulate: int, precision: str) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's rows of each micro-batch: those of the device with its number on JAX's mesh."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = len(next(iter(batch.values())))
    for window in np.arange(rows).reshape(accumulate, ranks, -1):
        yield {name: tensor(x[window[rank]], precision) for name, x in batch.items()}
