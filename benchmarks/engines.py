"""The engines: each a whole training step of a case, from the same weights, on the same batch."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import features
from benchmarks.job import Job
from benchmarks.workloads import Workload
from jaxtrain.errors import UserError
from parity.case import Batch, Case


@dataclass(frozen=True)
class Engine:
    """`step()` takes one whole step, to the end of what it started; `losses` are of all that were taken. `prepare()`
    comes before each, on time of its own. `compile_s`:
    seconds from nothing, `warm_compile_s`: with what the first time kept on disk; None where nothing is compiled.
    `flops` of a step as the mathematics has them: nothing computed again. `peak_bytes()`: the device's, None where it
    has no memory of its own.
    """

    step: Callable[[], None]
    losses: list[float]
    device: str
    peak_bytes: Callable[[], int | None]
    compile_s: float | None = None
    warm_compile_s: float | None = None
    flops: int | None = None
    prepare: Callable[[], None] = lambda: None


def engine(job: Job, workload: Workload) -> Engine:
    """The engine of `job`, compiled. Raises `UserError` for a setting that it has not."""
    case = workload.case(job.sizes)
    batch = case.batch(0, case.rows)
    if job.feature == features.MICRO_STEPS:
        return _micro_steps(case, batch, job)
    if job.engine == "jax":
        return _jax(case, batch, job)
    return _torch(case, batch, job, workload)


def _jax(case: Case, batch: Batch, job: Job) -> Engine:
    import jax

    from jaxtrain.cost import flops
    from parity import jax_side

    step = features.train_step(case, job)
    plain = features.train_step(case, Job(job.workload, "jax", accumulate=job.accumulate))
    state, abstract = _initial(case, step), jax.eval_shape(lambda: _initial(case, plain))
    arrays = jax_side.arrays(batch, "fp32")
    counted = flops(plain.pure, abstract, arrays)
    compiled, cold, warm = compiled_twice(step.jitted, state, arrays)
    device = jax.local_devices()[0]

    losses: list[float] = []

    def take() -> None:
        nonlocal state
        state, metrics = compiled(state, arrays)
        jax.block_until_ready(state)
        losses.append(float(metrics["loss"]))

    def peak() -> int | None:
        statistics = device.memory_stats() or {}
        return statistics.get("peak_bytes_in_use")

    return Engine(take, losses, device.device_kind, peak, cold, warm, counted)


def _micro_steps(case: Case, batch: Batch, job: Job) -> Engine:
    """`job.accumulate` gradients, each by a call of its own, and the update, by another."""
    import jax

    from parity import jax_side

    arrays = jax_side.arrays(batch, "fp32")
    rows = case.rows // job.accumulate
    micro_batches = [{name: x[i : i + rows] for name, x in arrays.items()} for i in range(0, case.rows, rows)]
    by_hand = features.MicroSteps(case, job)
    state = _initial(case, by_hand)
    losses: list[float] = []

    def take() -> None:
        nonlocal state
        for micro_batch in micro_batches:
            state = by_hand.add(state, micro_batch)
        state, loss = by_hand.update(state)
        jax.block_until_ready(state)
        losses.append(float(loss))

    return Engine(take, losses, jax.local_devices()[0].device_kind, lambda: None)


def compiled_twice(jitted: Any, *args: Any) -> tuple[Any, float, float]:
    """(the program, seconds from nothing, seconds with what the first time kept on disk)."""
    import jax

    begin = time.perf_counter()
    jitted.lower(*args).compile()
    cold = time.perf_counter() - begin
    jax.clear_caches()
    begin = time.perf_counter()
    compiled = jitted.lower(*args).compile()
    return compiled, cold, time.perf_counter() - begin


def _initial(case: Case, step: Any) -> Any:
    """The state around PyTorch's weights."""
    from parity import jax_side, torch_side

    params, model_state = jax_side.from_torch(case, torch_side.initial_weights(case, seed=0))
    return step.init(params, model_state=model_state)


def _torch(case: Case, batch: Batch, job: Job, workload: Workload) -> Engine:
    import torch

    from parity import torch_side

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # What "fp32" says, in convolutions as in products, as JAX's side has it.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    # The images are so already: [B, H, W, C], which the loss permutes.
    layout = torch.channels_last if workload.images else torch.contiguous_format
    model = torch_side.seeded_model(case, seed=0).to(device)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]  # which PyTorch's stubs leave out
    if job.remat == "full":
        _checkpointed(model, job)
    elif job.remat != "none":
        raise UserError(f"remat {job.remat} has no counterpart in PyTorch: time none and full")
    optimizer = torch.optim.AdamW(model.parameters(), **asdict(case.optimizer), fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
    rows = case.rows // job.accumulate
    micro_batches = [
        {name: torch.from_numpy(x[i : i + rows]).to(device) for name, x in batch.items()}
        for i in range(0, case.rows, rows)
    ]

    # Not `model.compile()`, which leaves a `Sequential` as it is.
    called: Any = model if job.engine == "torch_eager" else torch.compile(model)
    losses: list[float] = []

    def take() -> None:
        total = torch.zeros([], device=device)
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                summed, weight = case.torch_loss(called, micro_batch)
                loss = summed / weight / job.accumulate
            scaler.scale(loss).backward()
            total = total + loss.detach()
        scaler.unscale_(optimizer)
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        losses.append(float(total))

    def peak() -> int | None:
        return torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if job.engine == "torch_eager":
        return Engine(take, losses, name, peak)
    cold = _first(take)
    torch.compiler.reset()
    return Engine(take, losses, name, peak, cold, _first(take))


def _first(take: Callable[[], None]) -> float:
    begin = time.perf_counter()
    take()
    return time.perf_counter() - begin


def _checkpointed(model: Any, job: Job) -> None:
    # The first is what transformers 6 calls the second.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)({"use_reentrant": False})
            return
    raise UserError(f"the PyTorch model of {job.workload} has no gradient checkpointing: time remat none")
