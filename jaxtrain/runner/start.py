"""A run from its beginning to its end: build, check, start or resume, compile, train."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from jaxtrain.distributed import bypass_compilation_cache, describe_devices, processes, run_mesh
from jaxtrain.errors import UserError
from jaxtrain.observe import Console, first_rows, format_row, write_facts
from jaxtrain.profile import LoopTrace, current_source_lines
from jaxtrain.run import Recipe
from jaxtrain.run_folder import RunFolder, environment_changes, recorded_config
from jaxtrain.runner import preflight
from jaxtrain.runner.checkpoint import Checkpoints, Retention, saved_steps
from jaxtrain.runner.events import Events
from jaxtrain.runner.lock import RunLock, check_free
from jaxtrain.runner.position import Position
from jaxtrain.runner.resume import check_saved, saved_settings
from jaxtrain.runner.rollback import train_through
from jaxtrain.runner.session import Outcome, Phase, Session
from jaxtrain.runner.stops.out_of_memory import explain_out_of_memory
from jaxtrain.runner.training import Evaluation, Training, build_training
from jaxtrain.runner.unsaved import Unsaved
from jaxtrain.step import TrainState, averaged

if TYPE_CHECKING:
    from jaxtrain.labs.process_watch import ProcessWatch

Resume = bool | Literal["auto"]


def run_training(
    name: str,
    recipe: Recipe,
    run: RunFolder,
    *,
    resume: Resume,
    console: Console,
    trace: LoopTrace | None = None,
    events: Events | None = None,
) -> Outcome:
    """Train a recipe in a run folder, from the start or from the newest checkpoint.

    Nothing is written before settings, data and model have passed their checks.

    Args:
      name: Name of the recipe, for config.json and messages.
      recipe: The settings of the run.
      run: The folder of the run.
      resume: False starts a new run, True requires a checkpoint, "auto" does whichever applies.
      console: Prints progress and messages.
      trace: Profiles some of the steps.
      events: Functions of the user's to call; an exception in one ends the run, saved.

    Returns:
      The outcome: the run is done, or was stopped by a signal and saved.

    Raises:
      UserError: The settings, the data or the folder do not allow a run.
      RunFailed: All updates are skipped, an inf or NaN was applied, the loss spiked, memory ran out, or a file could
        not be written. Checkpoints saved before stay intact.
    """
    preflight.check_settings(recipe)
    retention = Retention(recipe.keep_last, recipe.keep_best, recipe.keep_every)
    uncached = bypass_compilation_cache(run_mesh(recipe.mesh))
    preflight.check_compiler()
    with uncached, RunLock(run.path) as lock, explain_out_of_memory(name, recipe, run):
        resuming = processes.once(lambda: _is_resuming(run, lock, resume))
        with console.phase("reading the data, initializing the model"):
            training = build_training(recipe, console.message)
            # A state that is to be restored is not allocated before: it would be on the devices twice.
            state = training.shapes() if resuming else training.init()
        batch = training.loader.peek()
        preflight.check_labels_in_batch(training.task, batch)
        baselines = {} if resuming or not processes.is_first() else training.task.baselines()
        facts = preflight.describe(training.task, state, batch, recipe, training.step.compiler_options)
        console.facts({**facts, **baselines})
        source = str(getattr(recipe, "data", None) or name)
        position = Position.start(training, state, batch, source=source, message=console.message)
        first, unsaved = None, Unsaved.of(training.task)
        if not resuming:
            saved = unsaved.saved_state(state)
            kept = retention.last + retention.best + 1  # the newest is written before the oldest is removed
            if full := preflight.check_disk(run.path, saved, kept):
                console.message(full)
            first = _first_evaluation(training, state, console)
            position.patience.score(first.metrics)
            processes.once(lambda: _create_folder(run, lock))
            processes.once(lambda: run.write_config(name, recipe))
            processes.once(lambda: write_facts(run, {**_about(recipe), **facts, **baselines}))
        recorded = saved_settings(recipe, training.task)
        with Checkpoints(run.checkpoints, retention, unsaved, recorded) as checkpoints, position.running():
            watch = _process_watch(console)
            session = Session(training, position, checkpoints, run, console, trace, events or Events(), watch)
            if resuming:
                state = _restore(session, state, recorded)
                for change in processes.once(lambda: environment_changes(recorded_config(run.config))):
                    console.message(f"the run was started with {change}: results may not be bit-identical")
                processes.once(lambda: run.write_config(name, recipe))
                console.message(f"resuming {run.path} at step {int(state.step)}")
            if int(state.step) >= recipe.steps:
                console.message(
                    f"step {int(state.step)} of {recipe.steps} is done: continue training with --resume --steps N"
                )
                return _outcome(session, state, 0)
            watch.enter(Phase.COMPILE, int(state.step))
            with watch:
                _compile(session, state, batch)
                # Collectives wait for a process that compiles longer, but not for ever.
                watch.enter(Phase.STEP, int(state.step))
                processes.wait_for_all()
                state, exit_status = train_through(session, state, first)
    return _outcome(session, state, exit_status)


def _process_watch(console: Console) -> "ProcessWatch":
    from jaxtrain.labs.process_watch import ProcessWatch

    return ProcessWatch(console.message)


def _about(recipe: Recipe) -> dict[str, str]:
    """Return the first line of a recipe's own docstring and the devices, as facts for the report."""
    doc = vars(type(recipe)).get("__doc__") or ""
    # A dataclass without a docstring has its signature as one.
    line = "" if doc.startswith(f"{type(recipe).__name__}(") else doc.strip().partition("\n\n")[0]
    about = {"recipe": " ".join(line.split())} if line else {}
    return {**about, "devices": describe_devices(recipe.mesh)}


def _is_resuming(run: RunFolder, lock: RunLock, resume: Resume) -> bool:
    """Whether to continue from a checkpoint. Locks the folder if it holds a run."""
    if not resume or (resume == "auto" and not run.config.exists()):
        check_free(run)
        return False
    lock.take()
    has_begun = bool(saved_steps(run.checkpoints)) or (run.checkpoints / "damaged").exists()
    if resume == "auto" and not has_begun and run.torch.exists():
        raise UserError(f"{run.path} was not imported completely: delete it and import it again")
    if resume is True and not has_begun:
        raise UserError(f"{run.path} has no checkpoint: start it again with --resume auto")
    # A run killed before its first checkpoint has nothing to lose and starts over.
    return has_begun


def _first_evaluation(training: Training, state: TrainState, console: Console) -> Evaluation:
    with console.phase("compiling the evaluation, computing the first loss"):
        first = training.evaluate(state)
    if "loss" in first.metrics:
        console.facts(preflight.check_first_loss(first.metrics["loss"], training.task, first.cause))
    if rows := first_rows(first.media):
        console.facts({tag: format_row(row) for tag, row in rows.items()})
    return first


def _create_folder(run: RunFolder, lock: RunLock) -> None:
    """Create and lock the folder of a new run; that of a run that starts over is locked already."""
    if not lock.held:
        run.make()
        lock.take()
        check_free(run)  # another process may have been faster


def _restore(session: Session, like: TrainState, recorded: Mapping[str, Any]) -> TrainState:
    state, saved = session.checkpoints.restore(like, on_damaged=session.console.message)
    try:
        changes = check_saved(saved, recorded, session.training.recipe, session.run)
        session.position.restore(saved, state)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        where = session.run.checkpoints / str(int(state.step))
        raise UserError(
            f"{where} does not hold the position of this run ({type(error).__name__}: {error}): remove it, and the "
            "checkpoint before it is used"
        ) from error
    for change in changes:
        session.console.message(change)
    return state


def _compile(session: Session, state: TrainState, batch: Any) -> None:
    """Compile the step before the clock of the first interval starts."""
    with (
        session.console.phase("compiling the training step"),
        current_source_lines() if session.trace else nullcontext(),
    ):
        program = session.training.step_of(batch).compile(state, batch)
    if session.trace:
        session.trace.hlo = program.as_text()


def _outcome(session: Session, state: TrainState, exit_status: int) -> Outcome:
    task, recipe = session.training.task, session.training.recipe
    sample = task.sample(averaged(state), recipe.seed) if task.sample and not exit_status else None
    return Outcome(int(state.step), exit_status, state, task, sample)
