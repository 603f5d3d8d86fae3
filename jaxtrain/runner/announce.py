"""What a run prints at its beginning and at its end, whoever started it."""

from collections.abc import Mapping, Sequence

from jaxtrain.distributed import describe_devices
from jaxtrain.observe import Console, LogLine
from jaxtrain.run import Recipe
from jaxtrain.run_folder import RunFolder, source_change
from jaxtrain.runner.session import Outcome


def announce(
    console: Console, name: str, recipe: Recipe, run: RunFolder, *, resumes: bool, version: str = "", cache: str = ""
) -> None:
    """Print the first line of a run, and what has changed in the code of a run that is resumed."""
    facts = (version, name, describe_devices(recipe.mesh), str(run.path), cache)
    console.headline(" · ".join(fact for fact in facts if fact))
    if resumes and (change := source_change(run, name)):
        console.message(change)


def conclude(
    console: Console, outcome: Outcome, metrics: Sequence[LogLine], places: Mapping[str, str], continuing: str
) -> None:
    """Print the summary of a run, and how a run that was stopped is continued."""
    console.summary(metrics, outcome.task.references, places)
    if outcome.exit_status:
        console.message(f"stopped and saved at step {outcome.step}: {continuing}")
