"""What the end of a run writes: result.json, the report, the last of TensorBoard."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxtrain.data import Batch, Example, Kind, kind_of, subsample
from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe import (
    ErrorAnalysis,
    LogLine,
    evaluate_examples,
    log_error_analysis,
    log_final,
    read_record,
    write_report,
    write_result,
)
from jaxtrain.run import Recipe, Task, evaluation_batches, run_policy
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner.session import Outcome
from jaxtrain.step import TrainState, averaged

# Misclassified examples shown in TensorBoard, and the number of validation examples they are taken from.
_WORST, _EVALUATED = 8, 512


def write_end(name: str, recipe: Recipe, run: RunFolder, outcome: Outcome) -> Sequence[LogLine]:
    """Write a run's result, report and TensorBoard summary.

    Args:
      name: Name of the recipe.
      recipe: The settings of the run.
      run: The folder of the run.
      outcome: Where the run stands.

    Returns:
      The lines of metrics.jsonl.

    Raises:
      RunFailed: A file cannot be written.
    """
    task = outcome.task
    try:
        if not run.config.exists():  # deleted meanwhile: without it the run could not be resumed
            run.write_config(name, recipe)
        write_result(
            run, step=outcome.step, references=task.references, sample=outcome.sample, prompt=task.sample_prompt
        )
        record = read_record(run)
        log_final(run.tensorboard, record)
        # With several processes, none holds the whole state.
        if not outcome.exit_status and _classifies(task) and processes.count() == 1:
            analysis = analyze_errors(name, recipe, task, outcome.state, "validation", _EVALUATED)
            log_error_analysis(run.tensorboard, analysis, _WORST)
        write_report(run.report, [record])
    except OSError as error:
        where = error.filename or run.report
        raise RunFailed(
            f"{where} cannot be written ({error.strerror}): the run is saved at step {outcome.step}"
        ) from error
    return record.metrics


def analyze_errors(
    name: str, recipe: Recipe, task: Task, state: TrainState, split: str, max_examples: int | None = None
) -> ErrorAnalysis:
    """Evaluate a state on a split, "validation" or "train", example by example.

    Args:
      name: Name of the recipe.
      recipe: The settings of the run.
      task: The task of the run.
      state: The state to evaluate, by its moving average if it has one.
      split: "validation" for the examples of the run's evaluations, "train" for as many training examples.
      max_examples: Evaluate a fixed random subset of this size; None for all examples.

    Returns:
      The loss and the prediction of each example.

    Raises:
      UserError: The task has no `predict` or no validation data.
    """
    if split == "validation" and task.validation is None:
        raise UserError(f"{name} has no validation data: use --split train, or define Task.validation")
    kind, source = kind_of(task.validation if split == "validation" else task.train)
    if kind is Kind.SOURCE:
        if split == "train":
            source = subsample(source, task.eval_rows or len(source))
        source = source if max_examples is None else subsample(source, max_examples)
    elif split == "train" and task.eval_rows is None:
        raise UserError(f"the training data of {name} has no length: define Task.eval_rows to evaluate some of it")
    batches, examples = evaluation_batches(source, task, recipe), source
    if kind is not Kind.SOURCE or not isinstance(source[0], Mapping):
        examples = []
        batches = _recorded(batches, examples)
    means, predictions = evaluate_examples(task, averaged(state), batches, precision=run_policy(recipe))
    return ErrorAnalysis(name, int(state.step), split, task, examples, means, predictions)


def _recorded(batches: Iterator[Batch], examples: list[Example]) -> Iterator[Batch]:
    """Yield batches and append their examples to a list."""
    for batch in batches:
        arrays = {name: x for name, x in batch.items() if name != "weight"}
        examples.extend({name: x[i] for name, x in arrays.items()} for i in np.flatnonzero(batch["weight"]))
        yield batch


def _classifies(task: Task) -> bool:
    return bool(task.class_names and task.predict and task.validation is not None)
