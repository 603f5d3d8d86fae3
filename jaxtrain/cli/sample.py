"""`jaxtrain sample DIR`: print text of a trained language model as it is generated, or talk to the model."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from jaxtrain.cli.conversation import message, print_chunks, talk
from jaxtrain.errors import UserError
from jaxtrain.flags import Flag, parse
from jaxtrain.run import Recipe, Task
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_params, restore_state, state_shapes, training_step
from jaxtrain.step import averaged

_PROMPT = "def "


@dataclass(frozen=True)
class Sample:
    """Generate text with a trained language model, or without a prompt on a terminal talk to a fine-tuned one."""

    folder: Annotated[str, Flag(positional=True, metavar="DIR")] = ""
    """The run's folder."""
    prompt: str | None = None
    """The text to continue, or the message to answer; None talks to a fine-tuned model, and gives others "def "."""
    length: int = 500
    """Number of tokens to generate, of an answer at most; bytes without a tokenizer."""
    temperature: float = 0.8
    """0 always takes the most likely token; 1 samples from the model's distribution."""
    seed: int = 0
    """Seed of the random number generator."""


def main(args: list[str]) -> int:
    """Parse, restore, generate, print."""
    options = parse(Sample(), args, "jaxtrain sample")
    _check(options)
    run = RunFolder(Path(options.folder))
    name, recipe = read_recipe(run)
    with Console(stderr=True).status(f"reading {run.path}"):
        task = recipe.task()
        if task.reply is not None:
            if options.prompt is None and not sys.stdin.isatty():
                raise UserError("there is no terminal for a conversation: use --prompt TEXT")
            reply = partial(
                task.reply, _params(run, recipe, task), length=options.length, temperature=options.temperature
            )
        else:
            chunks = _text(run, name, recipe, task, options)
            begin = [*itertools.islice(chunks, 2)]  # the prompt and the first chunk, which compiles
    if task.reply is None:
        print_chunks(itertools.chain(begin, chunks))
    elif options.prompt is None:
        talk(reply, options.seed)
    else:
        print_chunks(reply([message("user", options.prompt)], seed=options.seed))
    return 0


def _check(options: Sample) -> None:
    if options.prompt == "":
        raise UserError("--prompt must not be empty: use at least one character")
    if options.length < 1:
        raise UserError(f"--length must be positive, got {options.length}: use 1 or more")
    for name, value in (("temperature", options.temperature), ("seed", options.seed)):
        if value < 0:
            raise UserError(f"--{name} must not be negative, got {value}: use 0 or more")


def _params(run: RunFolder, recipe: Recipe, task: Task) -> Any:
    like = state_shapes(training_step(recipe, task), task, recipe)
    return restore_params(run.checkpoints, like.params, average=like.ema, task=task)


def _text(run: RunFolder, name: str, recipe: Recipe, task: Task, options: Sample) -> Iterator[str]:
    """Return a prompt and its continuation, or a text without a prompt."""
    if task.continue_text is not None:
        return task.continue_text(
            _params(run, recipe, task),
            options.prompt or _PROMPT,
            length=options.length,
            temperature=options.temperature,
            seed=options.seed,
        )
    if task.sample is not None:
        return iter([task.sample(averaged(restore_state(run.checkpoints, recipe, task)), options.seed)])
    raise UserError(
        f"{run.path} holds a run of {name}, which continues no text: define Task.continue_text or Task.sample, or use "
        "a run of a language model"
    )
