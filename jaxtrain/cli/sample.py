"""`jaxtrain sample DIR`: generate text with a trained language model and print it as it is generated."""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxtrain.cli.flags import parse, run_folder_argument
from jaxtrain.data import replace_unprintable
from jaxtrain.errors import UserError
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_params, restore_state, state_shapes, training_step
from jaxtrain.step import averaged


@dataclass(frozen=True)
class Sample:
    """Generate text with a trained language model."""

    prompt: str = "def "
    """The text to continue."""
    length: int = 500
    """Number of tokens to generate; bytes without a tokenizer."""
    temperature: float = 0.8
    """0 always takes the most likely token; 1 samples from the model's distribution."""
    seed: int = 0
    """Seed of the random number generator."""


def main(args: list[str]) -> int:
    """Parse, restore, generate, print."""
    folder, flags = run_folder_argument(args, "jaxtrain sample DIR [--prompt TEXT]")
    options = parse(Sample(), flags, f"jaxtrain sample {folder}")
    _check(options)
    run = RunFolder(Path(folder))
    name, recipe = read_recipe(run)
    with Console(stderr=True).status(f"reading {run.path}"):
        task = recipe.task()
        if task.continue_text is None and task.sample is None:
            raise UserError(
                f"{run.path} holds a run of {name}, which continues no text: define Task.continue_text or Task.sample, "
                "or use a run of a language model"
            )
        if task.continue_text is not None:
            like = state_shapes(training_step(recipe, task), task, recipe).params
            params = restore_params(run.checkpoints, like, averaged=recipe.ema is not None, task=task)
            chunks = task.continue_text(
                params, options.prompt, length=options.length, temperature=options.temperature, seed=options.seed
            )
        else:
            assert task.sample is not None
            state = averaged(restore_state(run.checkpoints, recipe, task))
            chunks = iter([task.sample(state, options.seed)])
        begin = [*itertools.islice(chunks, 2)]  # the prompt and the first chunk, which compiles
    for text in itertools.chain(begin, chunks):
        sys.stdout.write(replace_unprintable(text))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _check(options: Sample) -> None:
    if not options.prompt:
        raise UserError("--prompt must not be empty: use at least one character")
    if options.length < 1:
        raise UserError(f"--length must be positive, got {options.length}: use 1 or more")
    for name, value in (("temperature", options.temperature), ("seed", options.seed)):
        if value < 0:
            raise UserError(f"--{name} must not be negative, got {value}: use 0 or more")
