"""The training loop: build, check, begin or resume; then step, log, evaluate, save, until done or told to stop."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.cost import flops, peak_memory_bytes
from jaxtrain.data.loader import Loader
from jaxtrain.distributed import (
    bypass_compilation_cache,
    constrained,
    local_rows,
    placed_whole,
    processes,
    run_mesh,
    shard,
)
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe import Console, Gauges, MetricsLog, NoMetricsLog, histograms, metrics_log
from jaxtrain.optim import used_learning_rate, used_learning_rates
from jaxtrain.profile import LoopTrace, lines_of_now
from jaxtrain.recipes import Recipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import preflight
from jaxtrain.runner.batches import Batches
from jaxtrain.runner.checkpoint import Checkpoints, Retention, saved_steps
from jaxtrain.runner.guards import DispatchedStep, Guard, RunInvalid, Spike, write_batch
from jaxtrain.runner.lock import RunLock, check_free
from jaxtrain.runner.optimizer import training_step
from jaxtrain.runner.out_of_memory import explain_out_of_memory
from jaxtrain.runner.signals import StopSignals
from jaxtrain.step import (
    LossScaleState,
    TrainState,
    TrainStep,
    checked,
    consecutive,
    current_scale,
    eval_step,
    leaf_name,
)
from jaxtrain.tasks import Task, build, check_memory, evaluation_batches, means

# A sound fp16 run finds its scale in the thousands or above; below this, small gradients round to 0.
LOW_SCALE = 1024
# Of a step's metrics, what a line of metrics.jsonl is made of.
_LOGGED = ("loss", "weight", "grad_norm", "loss_scale", "skipped", "nonfinite_micro_batch", "nonfinite_leaf")

Resume = bool | Literal["auto"]
Evaluation = Callable[[TrainState], dict[str, float]]


@dataclass(frozen=True)
class Outcome:
    """Where a run stands when `fit` returns. `exit_status`: 0, or 128 + the number of the signal that stopped it."""

    step: int
    exit_status: int
    references: Mapping[str, float]
    sample: str | None


@dataclass(frozen=True)
class Training:
    """What a recipe is made into, besides the state: none of it is saved but the loader's position."""

    recipe: Recipe
    task: Task
    loader: Loader
    step: TrainStep
    evaluate: Evaluation
    trace: LoopTrace | None = None


def fit(
    name: str, recipe: Recipe, run: RunFolder, *, resume: Resume, console: Console, trace: LoopTrace | None = None
) -> Outcome:
    """Train `recipe` in the folder `run`, from its start or from its newest checkpoint.

    `resume`: False for a new run, True for one that has a checkpoint, "auto" for whichever it is. Nothing is written
    before data, model and settings have passed their checks; raises `UserError` for what does not. Raises `RunFailed`,
    what was saved before left whole, where the updates are skipped for good, an inf or NaN was applied, the memory does
    not suffice or nothing can be written any more.
    """
    preflight.check_settings(recipe)
    keep = Retention(recipe.keep_last, recipe.keep_best, recipe.keep_every)
    uncached = bypass_compilation_cache(run_mesh(recipe.mesh))
    with uncached, RunLock(run.path) as lock, explain_out_of_memory(name, recipe, run):
        resuming = processes.once(lambda: _resuming(run, lock, resume))
        with console.phase("reading the data, initialising the model"):
            training, state = build_training(recipe)
        task = training.task
        batch = _peek(training.loader)
        preflight.check_labels_in_batch(task, batch)
        console.facts(preflight.describe(task, state, batch, recipe))
        position = Position(
            Batches(training.loader, str(recipe.data or name), recipe.stall_seconds, console.message),
            Interval(recipe, task),
            Guard(recipe, state.params),
            _gauges(training, state, batch),
        )
        first = None
        if not resuming:
            first = _first_evaluation(training, state, console)
            processes.once(lambda: _create(run, lock))
            processes.once(lambda: run.write_config(name, recipe))
        with Checkpoints(run.checkpoints, keep) as checkpoints, position.batches, closing(position.gauges):
            if resuming:
                state, saved = checkpoints.restore(state, set_aside=console.message)
                position.restore(saved, state)
                processes.once(lambda: run.write_config(name, recipe))
                console.message(f"resuming {run.path} at step {int(state.step)}")
            if int(state.step) >= recipe.steps:
                console.message(f"step {int(state.step)} of {recipe.steps} is done: --resume --steps N trains on")
                return Outcome(int(state.step), 0, task.references, _sample(task, state, recipe))
            with console.phase("compiling the training step"), lines_of_now() if trace else nullcontext():
                program = training.step.compile(state, batch)
            if trace:
                training, trace.hlo = replace(training, trace=trace), program.as_text()
            state, exit_status = _train_through(training, state, position, checkpoints, run, first, console)
    sample = None if exit_status else _sample(task, state, recipe)
    return Outcome(int(state.step), exit_status, task.references, sample)


def _resuming(run: RunFolder, lock: RunLock, resume: Resume) -> bool:
    """Whether to go on from a checkpoint; the folder is locked where it holds a run."""
    if not resume or (resume == "auto" and not run.config.exists()):
        check_free(run)
        return False
    lock.take()
    begun = bool(saved_steps(run.checkpoints)) or (run.checkpoints / "damaged").exists()
    if resume == "auto" and not begun and run.torch.exists():
        raise UserError(f"{run.path} was not imported to its end: delete it and import it again")
    # Killed before its first checkpoint, a run has nothing to lose: it is begun again.
    return begun or resume is True


def build_training(recipe: Recipe) -> tuple[Training, TrainState]:
    """The parts of a run of `recipe`, and its first state."""
    mesh, task = run_mesh(recipe.mesh), build(recipe)
    step = training_step(recipe, task.loss_fn)
    rows = None
    if mesh is None:
        state = step.init(task.params, model_state=task.model_state, seed=recipe.seed)
    else:
        check_memory(task.init, mesh.shape["fsdp"] * mesh.shape["tensor"])
        step = shard(step, mesh, task.sharding)
        # Made where they are to be, never whole on one device.
        state = step.init(lambda: task.init()[0], model_state=lambda: task.init()[1], seed=recipe.seed)
        rows = local_rows(mesh, recipe.batch_size, recipe.accumulate)
    loader = Loader(task.train, recipe.batch_size, recipe.seed, rows=rows)
    return Training(recipe, task, loader, step, _evaluation(task, recipe, mesh)), state


def _gauges(training: Training, state: TrainState, batch: Any) -> Gauges:
    """Of the run's own devices; what a step computes is counted on one share of its rows, which is this process's."""
    shapes = jax.eval_shape(lambda *args: args, state.params, batch, state.rng, state.model_state)

    def model_flops() -> int:
        # A backward pass takes two products for each of the forward pass's.
        shares = training.recipe.batch_size // len(next(iter(batch.values())))
        return 3 * flops(checked(training.task.loss_fn), *shapes) * shares

    devices = jax.tree.leaves(state.params)[0].sharding.device_set
    return Gauges(model_flops, len(devices), training.recipe.precision)


def _first_evaluation(training: Training, state: TrainState, console: Console) -> dict[str, float]:
    with console.phase("compiling the evaluation, taking the first loss"):
        first = training.evaluate(state)
    console.facts(preflight.check_first_loss(first["loss"], training.task))
    return first


def _create(run: RunFolder, lock: RunLock) -> None:
    """Make the folder of a new run, and lock it: that of one begun again is locked already."""
    if not lock.held:
        run.make()
        lock.take()
        check_free(run)  # another process may have come first


def _train_through(
    training: Training,
    state: TrainState,
    position: "Position",
    checkpoints: Checkpoints,
    run: RunFolder,
    first: dict[str, float] | None,
    console: Console,
) -> tuple[TrainState, int]:
    """Train to the end, with `first` as its first evaluation; past spikes, where the recipe has it so.

    Raises `RunFailed` for a step after which the run cannot go on.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    while True:
        with metrics_log(run.metrics, run.tensorboard, from_step=0 if first else int(state.step) + 1) as log:
            if first:
                log.write({"step": 0, **_prefixed(first)})
                checkpoints.save(state, position.state(), first["loss"])
            try:
                return _train(training, state, position, checkpoints, log, console)
            except RunInvalid as error:
                spoiled = error.with_traceback(None)  # whose frames hold on to a state
        checkpoints.wait()
        if not (isinstance(spoiled, Spike) and training.recipe.on_spike == "rollback"):
            raise _spoiled(spoiled, run, position)
        # A stop saves out of turn: an undisturbed run would not have that checkpoint to go back to.
        saved_at = processes.once(lambda: saved_steps(run.checkpoints))
        in_turn = [step for step in saved_at if step % training.recipe.save_every == 0] or saved_at
        state, saved = checkpoints.restore(like, console.message, before=max(in_turn) + 1)
        if not position.roll_back(saved, state, spoiled):
            raise _spoiled(spoiled, run, position)
        console.message(
            f"step {spoiled.taken.step}: {spoiled.what}: back to step {int(state.step)}, past "
            f"{spoiled.taken.next_batch - saved['next_batch']} batches"
        )
        first = None


def _spoiled(spoiled: RunInvalid, run: RunFolder, position: "Position") -> RunFailed:
    taken = replace(spoiled.taken, batch=position.batches.whole(spoiled.taken.batch))

    def kept() -> str:
        try:
            write_batch(run.replay, taken, position.guard.event)
        except OSError as error:
            return f" (its batch could not be saved: {error.strerror})"
        return ""

    lost, newest, step = *processes.once(lambda: (kept(), max(saved_steps(run.checkpoints)))), taken.step
    return RunFailed(
        f"step {step}: {spoiled.what}: stopped{lost}, the checkpoint of step {newest} is sound; jaxtrain replay "
        f"{run.path} {step} says where it arose; then start again, with a lower --lr or another --precision, say"
    )


def _train(
    training: Training,
    state: TrainState,
    position: "Position",
    checkpoints: Checkpoints,
    log: MetricsLog | NoMetricsLog,
    console: Console,
) -> tuple[TrainState, int]:
    """Take the steps that are left: the last state, its checkpoint committed, and the exit status.

    Raises `RunInvalid` for a step after which it cannot go on.
    """
    recipe, task = training.recipe, training.task
    batches, interval, guard = position.batches, position.interval, position.guard
    to_warn = isinstance(state.loss_scale, LossScaleState)
    with StopSignals() as stop, console.progress(int(state.step), recipe.steps, task.unit) as progress:
        interval.restart_clock()
        for i in range(int(state.step) + 1, recipe.steps + 1):
            if training.trace:
                training.trace.before(i, state)
            batch = next(batches)
            state, metrics = training.step(state, batch)
            interval.add(metrics)
            interval.waited += batches.waited
            guard.add(DispatchedStep(i, batch, batches.next_batch, metrics))
            line: dict[str, Any] = {}
            last = i == recipe.steps or interval.stuck
            # The first step after a rollback has a line, so that what was skipped is told at once.
            if i % recipe.log_every == 0 or i % recipe.eval_every == 0 or last or guard.event:
                guard.settle()
                line = {"step": i, **interval.close(), **_rates(state), **guard.take_event()}
                line |= position.gauges.read(line["step_time_s"])
            if i % recipe.eval_every == 0 or i == recipe.steps:
                line |= _prefixed(training.evaluate(state))
                if recipe.histograms:
                    log.histograms(i, histograms(state.params))
                interval.restart_clock()
            if line:
                log.write(line)
            progress.advance(i, line)
            if line and to_warn and interval.highest_scale < LOW_SCALE:
                console.message(_low_scale(i, interval.highest_scale))
                to_warn = False
            if line and (warning := position.gauges.warning(line)):
                console.message(warning)
            stopping = stop.wanted(i) or last or interval.stuck
            if i % recipe.save_every == 0 or stopping:
                guard.check(state)
                # A stop leaves no line of its own: the resumed run logs what an uninterrupted one would have.
                checkpoints.save(state, position.state(), line.get("eval_loss"))
                interval.restart_clock()
            if interval.stuck:
                raise RunFailed(_stuck(i, state, recipe, interval.nonfinite))
            if stopping:
                break
        checkpoints.wait()
        if training.trace:
            training.trace.close(state)
    return state, stop.exit_status


@dataclass(frozen=True)
class Position:
    """Where a run stands besides its state: in the data, in the next line, and in what losses are judged against.

    And `gauges`, which hold nothing that a checkpoint would keep.
    """

    batches: Batches
    interval: "Interval"
    guard: Guard
    gauges: Gauges

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as JSON: waits for the last step."""
        return {**self.batches.state(), "interval": self.interval.state(), "guard": self.guard.state()}

    def restore(self, saved: dict[str, Any], state: TrainState) -> None:
        """Go on from `state()`, at the checkpoint that holds `state`."""
        self.batches.restore(saved)
        self.interval.restore(saved.get("interval"), skips=int(consecutive(state.loss_scale)))
        self.guard.restore(saved.get("guard"))

    def roll_back(self, saved: dict[str, Any], state: TrainState, spike: Spike) -> bool:
        """Go back to a checkpoint, but in the data past the spike. False where that was done too often."""
        self.batches.restore({**saved, "next_batch": spike.taken.next_batch})
        self.interval.restore(saved.get("interval"), skips=int(consecutive(state.loss_scale)))
        return self.guard.roll_back(int(state.step), spike, saved)


class Interval:
    """The steps since the last logged line: their mean loss, skips and throughput.

    `highest_scale`: the loss scale's highest in the interval last closed. `stuck`: whether `recipe.max_skips` steps
    in a row were skipped. `nonfinite`: micro-batch and leaf where the interval's last gradient that was not finite
    first was not. `waited`: seconds that its batches were waited for.
    """

    def __init__(self, recipe: Recipe, task: Task) -> None:
        self.waited = 0.0
        self.highest_scale, self.stuck, self.nonfinite = float("inf"), False, (-1, -1)
        self._skips, self._max_skips = 0, recipe.max_skips
        self._per_step = recipe.batch_size * task.units_per_row
        self._unit = task.unit
        self._restored: list[dict[str, float]] = []
        self._metrics: list[dict[str, jax.Array]] = []
        self._seconds, self._since = 0.0, time.perf_counter()

    def state(self) -> dict[str, Any]:
        """The steps since the last line, so that the next one is the same after a restart: waits for the last step."""
        steps = self._on_host()
        if steps:
            self._seconds += time.perf_counter() - self._since
        self._since = time.perf_counter()
        return {"steps": steps, "seconds": self._seconds, "waited": self.waited}

    def restore(self, state: dict[str, Any] | None, *, skips: int) -> None:
        """Go on from `state()`, None before the first step, with the last `skips` steps skipped in a row."""
        self._restored, self._seconds = (state["steps"], state["seconds"]) if state else ([], 0.0)
        self._metrics, self.waited = [], state.get("waited", 0.0) if state else 0.0
        self._skips = skips

    def add(self, metrics: dict[str, jax.Array]) -> None:
        """Take note of a dispatched step, having waited for the one before it: the device is never left idle."""
        # On its way before it is asked for, so that asking costs no wait of its own.
        metrics["skipped"].copy_to_host_async()
        if self._metrics:
            self._metrics[-1]["loss"].block_until_ready()
            self._count(self._metrics[-1])
        self._metrics.append(metrics)

    def _count(self, done: dict[str, Any]) -> None:
        self._skips = self._skips + 1 if done["skipped"] else 0
        self.stuck |= self._skips >= self._max_skips

    def _on_host(self) -> list[dict[str, float]]:
        """Every step's numbers; a float32 is exact as a Python float, so that a restart changes no mean."""
        ran = [{name: m[name].item() for name in _LOGGED} for m in jax.device_get(self._metrics)]
        return [*self._restored, *ran]

    def restart_clock(self) -> None:
        """Leave out of the throughput what was done besides steps."""
        self._since = time.perf_counter()

    def close(self) -> dict[str, Any]:
        """The interval as a line of metrics.jsonl; a new one begins."""
        steps = self._on_host()
        self._seconds += time.perf_counter() - self._since
        last, n = steps[-1], len(steps)
        self._count(last)
        self.highest_scale = max(m["loss_scale"] for m in steps)
        for m in steps:
            if m["nonfinite_leaf"] >= 0:
                self.nonfinite = int(m["nonfinite_micro_batch"]), int(m["nonfinite_leaf"])
        weights = np.array([m["weight"] for m in steps])
        line = {
            "loss": float(np.average([m["loss"] for m in steps], weights=weights if weights.any() else None)),
            "grad_norm": last["grad_norm"],
            "loss_scale": last["loss_scale"],
            "skipped": int(sum(m["skipped"] for m in steps)),
            f"{self._unit}_per_s": n * self._per_step / self._seconds,
            "step_time_s": self._seconds / n,
            "input_wait_s": self.waited / n,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        self._restored, self._metrics = [], []
        self._seconds, self._since, self.waited = 0.0, time.perf_counter(), 0.0
        return line


def _rates(state: TrainState) -> dict[str, float]:
    """`lr`, of the last update; of parameter groups the first one's, and `lr/i` of each. None without a rate."""
    of_groups = used_learning_rates(state.opt_state)
    if of_groups:
        rates = {f"lr/{name}": float(rate) for name, rate in of_groups.items()}
        return {"lr": next(iter(rates.values())), **rates}
    rate = used_learning_rate(state.opt_state)
    return {} if rate is None else {"lr": float(rate)}


def _low_scale(step: int, scale: float) -> str:
    return (
        f"warning: step {step}: the loss scale has stayed at {scale:g} or below, so that small gradients are lost: "
        "is the learning rate too high, is the loss a sum where it should be a mean, "
        "or do activations overflow? then try --precision bf16"
    )


def _stuck(step: int, state: TrainState, recipe: Recipe, where: tuple[int, int]) -> str:
    micro_batch, leaf = where
    return (
        f"step {step}: {recipe.max_skips} updates in a row were skipped, their gradients inf or NaN down to loss scale "
        f"{float(current_scale(state.loss_scale)):g}, the last first in {leaf_name(state.params, leaf)}, micro-batch "
        f"{micro_batch}; saved: start again with a lower --lr or with --precision bf16"
    )


def _peek(loader: Loader) -> dict[str, np.ndarray]:
    position = loader.state()
    batch = next(loader)
    loader.restore(position)
    return batch


def _evaluation(task: Task, recipe: Recipe, mesh: Mesh | None) -> Evaluation:
    """A function from a state to the means of loss and metrics over the task's validation rows."""
    loss_fn = task.loss_fn if mesh is None else constrained(task.loss_fn, mesh, task.sharding)
    evaluate = eval_step(loss_fn, precision=recipe.precision)

    def evaluation(state: TrainState) -> dict[str, float]:
        batches: Any = evaluation_batches(task.validation, task, recipe)
        if mesh is not None:
            batches = (placed_whole(batch, mesh) for batch in batches)
        return means([jax.device_get(evaluate(state, batch)) for batch in batches])

    return evaluation


def _prefixed(evaluated: dict[str, float]) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in evaluated.items()}


def _sample(task: Task, state: TrainState, recipe: Recipe) -> str | None:
    return task.sample(state.params, recipe.seed) if task.sample else None
