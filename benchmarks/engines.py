"""Engines: whole training steps of a case, from the same weights, on the same batch, in JAX and in PyTorch."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import features
from benchmarks.job import Job
from benchmarks.workloads import Workload
from jaxtrain.errors import UserError
from parity.case import Batch, Case

TORCH_ATTENTION = ("cuDNN", "FlashAttention")
"""Features of PyTorch's engines: the only kernel that its attention may use. By default PyTorch chooses."""

_LENT = ExitStack()
"""A user's own module has its new weights as long as it is lent: for the rest of the process."""


@dataclass(frozen=True)
class Engine:
    """A step to time, with its counters.

    Attributes:
      step: Runs one whole step and waits for its results.
      losses: The losses of all steps so far; empty for work without a loss.
      device: Name of the device.
      peak_bytes: Returns the device's peak memory in bytes, None for a device without its own memory.
      compile_s: Seconds to compile with an empty cache; None where nothing is compiled.
      warm_compile_s: Seconds to compile with the persistent cache filled; None likewise.
      flops: FLOPs of a step as the mathematics has them, without rematerialization; None if unknown.
      predicted: What `jaxtrain.cost.GpuProgram` predicts from the program that runs; empty for devices that are not
        among its targets.
      units: (number, name) of what throughput counts in a step; None where the job's name tells.
      prepare: Called before each step, outside its time.
      note: A line to report about this engine, such as reduced work; "" for none.
    """

    step: Callable[[], None]
    losses: list[float]
    device: str
    peak_bytes: Callable[[], int | None]
    compile_s: float | None = None
    warm_compile_s: float | None = None
    flops: int | None = None
    predicted: Mapping[str, Any] = field(default_factory=dict)
    units: tuple[int, str] | None = None
    prepare: Callable[[], None] = lambda: None
    note: str = ""


def engine(job: Job, workload: Workload) -> Engine:
    """Return the compiled engine of a job. Raises `UserError` for a setting that the engine does not have."""
    case = workload.case(job.sizes)
    batch = case.batch(0, case.rows)
    if job.feature == features.MICRO_STEPS:
        return _micro_steps(case, batch, job)
    built = _jax(case, batch, job) if job.engine == "jax" else _torch(case, batch, job, workload)
    return replace(built, units=(workload.units_per_step(job.sizes), workload.unit))


def _jax(case: Case, batch: Batch, job: Job) -> Engine:
    import jax

    from jaxtrain.cost import flops
    from parity.sides import jax_side

    step = features.train_step(case, job)
    state, arrays = _initial_state(case, job, step), jax_side.arrays(batch, job.precision)
    compiled, cold, warm, flop_count = step.jitted, None, None, None
    predicted: dict[str, Any] = {}
    if job.precision != "fp64":  # which is not timed
        plain = features.train_step(case, Job(job.workload, "jax", accumulate=job.accumulate))
        flop_count = flops(plain.pure, jax.eval_shape(lambda: _initial_state(case, job, plain)), arrays)
        compiled, cold, warm = compile_twice(step.jitted, state, arrays)
        predicted = prediction(compiled)
    device = jax.local_devices()[0]
    losses: list[float] = []

    def run_step() -> None:
        nonlocal state
        state, metrics = compiled(state, arrays)
        jax.block_until_ready(state)
        losses.append(float(metrics["loss"]))

    def peak_bytes() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    return Engine(run_step, losses, device.device_kind, peak_bytes, cold, warm, flop_count, predicted)


def prediction(compiled: Any) -> dict[str, Any]:
    """Return what a program is predicted to take on the local device; empty if that is not one of the targets.

    Args:
      compiled: The program.

    Returns:
      Seconds of a run, bytes that it moves, its most memory, and its products by the dtypes of operands and result.
    """
    import jax

    from jaxtrain.cost import GpuProgram, target_of

    target = target_of(jax.local_devices()[0])
    if target is None:
        return {}
    program = GpuProgram.read(compiled, target)
    return {
        "predicted_s": program.seconds,
        "predicted_moved_bytes": program.moved_bytes,
        "predicted_peak_bytes": program.peak_bytes,
        "products": dict(program.product_dtypes),
    }


def _micro_steps(case: Case, batch: Batch, job: Job) -> Engine:
    """A window as `job.accumulate` calls that add a gradient, and one call that updates."""
    import jax

    from parity.sides import jax_side

    arrays = jax_side.arrays(batch, job.precision)
    rows = case.rows // job.accumulate
    micro_batches = [{name: x[i : i + rows] for name, x in arrays.items()} for i in range(0, case.rows, rows)]
    micro_steps = features.MicroSteps(case, job)
    state = _initial_state(case, job, micro_steps)
    losses: list[float] = []

    def run_step() -> None:
        nonlocal state
        for micro_batch in micro_batches:
            state = micro_steps.add(state, micro_batch)
        state, loss = micro_steps.update(state)
        jax.block_until_ready(state)
        losses.append(float(loss))

    return Engine(run_step, losses, jax.local_devices()[0].device_kind, lambda: None)


def compile_twice(jitted: Any, *args: Any) -> tuple[Any, float, float]:
    """Compile with an empty and with a filled persistent cache.

    Returns:
      A tuple (compiled program, seconds of the first compilation, seconds of the second).
    """
    import jax

    begin = time.perf_counter()
    jitted.lower(*args).compile()
    cold = time.perf_counter() - begin
    jax.clear_caches()
    begin = time.perf_counter()
    compiled = jitted.lower(*args).compile()
    return compiled, cold, time.perf_counter() - begin


def _initial_state(case: Case, job: Job, step: Any) -> Any:
    """Return the initial state of `step` with PyTorch's initial weights."""
    from parity.sides import jax_side, torch_side

    trees = jax_side.from_torch(case, torch_side.initial_weights(case, seed=0))
    params, model_state = (jax_side.arrays(tree, "fp64") for tree in trees) if job.precision == "fp64" else trees
    return step.init(params, model_state=model_state)


def _torch(case: Case, batch: Batch, job: Job, workload: Workload) -> Engine:
    import torch

    from parity.sides import torch_side

    device = torch_device()
    if job.feature in TORCH_ATTENTION:
        torch.backends.cuda.enable_cudnn_sdp(job.feature == "cuDNN")
        torch.backends.cuda.enable_flash_sdp(job.feature == "FlashAttention")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    # In convolutions as in products, as on JAX's side.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    # The images already have this layout: they are [B, H, W, C], which the loss permutes.
    layout = torch.channels_last if workload.images else torch.contiguous_format
    is_own = case.module is not None
    model = _LENT.enter_context(torch_side.seeded_model(case, 0)) if is_own else torch_side.model_of(case)
    model = model.to(device, torch.float64 if job.precision == "fp64" else torch.float32)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]  # missing from PyTorch's stubs
    if job.remat == "full":
        _enable_checkpointing(model, job)
    elif job.remat != "none":
        raise UserError(f"remat {job.remat!r} has no counterpart in PyTorch: use none or full")
    dtype = torch_side.COPY.get(job.precision)
    copied = torch_side.LowPrecisionCopy(case, model, dtype) if dtype else None
    optimizer = _fused(case.torch_optimizer(copied.masters if copied else model))
    found = torch_engine(case, model, optimizer, [batch], job, copied)
    if job.engine == "torch_eager":
        return found
    cold = _seconds(found.step)
    torch.compiler.reset()
    return replace(found, compile_s=cold, warm_compile_s=_seconds(found.step))


def torch_engine(
    case: Case, model: Any, optimizer: Any, batches: Sequence[Batch], job: Job, copied: Any = None
) -> Engine:
    """Return PyTorch's step of a case.

    Args:
      case: The case.
      model: Its model, on the device.
      optimizer: The optimizer of the model's parameters, or of those of `copied`.
      batches: The batches of a step, each of which is a window and makes an update.
      job: The engine and its settings.
      copied: Copies of the model in another dtype (`parity.sides.torch_side.LowPrecisionCopy`); None without.
    """
    import torch

    from parity.oracle.in_torch import InFloat64
    from parity.sides import torch_side

    device, wide = torch_device(), job.precision == "fp64"
    dtype = torch_side.COPY.get(job.precision)
    computing, model = (copied.model, copied.masters) if copied else (model, model)
    scheduler = None if case.optimizer.scheduler is None else case.optimizer.scheduler(optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
    windows = [_micro_batches(batch, job.accumulate, torch.float64 if wide else dtype, device) for batch in batches]

    # Not `model.compile()`, which does nothing to a `Sequential`.
    called: Any = torch.compile(computing) if job.engine == "torch_compile" else computing
    losses: list[float] = []

    def update(micro_batches: Sequence[Any]) -> None:
        total = torch.zeros([], device=device)
        optimizer.zero_grad()
        if copied:
            copied.round_params()
        for micro_batch in micro_batches:
            with InFloat64() if wide else nullcontext():
                with torch.autocast(device.type, autocast, enabled=autocast is not None):
                    summed, weight = case.torch_loss(called, micro_batch)
                    loss = summed / weight / job.accumulate
                scaler.scale(loss).backward()
                if copied:
                    copied.move_gradients()
            total = total + loss.detach()
        scaler.unscale_(optimizer)
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        losses.append(float(total))

    def run_step() -> None:
        for window in windows:
            update(window)

    def peak_bytes() -> int | None:
        return torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return Engine(run_step, losses, name, peak_bytes)


def torch_device() -> Any:
    """Return the device on which PyTorch is timed."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _micro_batches(batch: Batch, count: int, dtype: Any, device: Any) -> list[Any]:
    """Return the rows of a batch as some micro-batches."""
    rows = len(next(iter(batch.values()))) // count
    starts = range(0, count * rows, rows)
    return [{name: _tensor(x[i : i + rows], dtype).to(device) for name, x in batch.items()} for i in starts]


def _fused(optimizer: Any) -> Any:
    """Let an optimizer update all parameters in one kernel, where it can."""
    import torch

    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        # As the constructor does for fused=True: the kernel unscales the gradients, and skips an overflow.
        optimizer._step_supports_amp_scaling = True
    return optimizer


def _tensor(x: Any, dtype: Any) -> Any:
    """Return `x` as a tensor, a floating one in `dtype`; None keeps its dtype."""
    import torch

    tensor = torch.from_numpy(x)
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def _seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _enable_checkpointing(model: Any, job: Job) -> None:
    # transformers 6 renames the second to the first.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)({"use_reentrant": False})
            return
    raise UserError(f"the PyTorch model of {job.workload} has no gradient checkpointing: use remat none")
