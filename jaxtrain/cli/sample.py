"""`jaxtrain sample DIR`: generate text with a trained language model and print it as it is generated."""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console

from jaxtrain.cli.flags import parse, run_folder_argument
from jaxtrain.errors import UserError
from jaxtrain.recipes import LanguageRecipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_params


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
    if not isinstance(recipe, LanguageRecipe):
        raise UserError(f"{run.path} holds a run of {name}, which generates no text: use a run of a language model")
    from jaxtrain.data import tokenizer
    from jaxtrain.models import Sampling, stream
    from jaxtrain.tasks.language import decoder
    from jaxtrain.tasks.text_stream import decode_stream, replace_unprintable

    texts = tokenizer(recipe.tokenizer)
    prompt, sampling = texts.encode(options.prompt).tolist(), Sampling(options.temperature)
    with Console(stderr=True).status(f"reading {run.path}"):
        model = decoder(recipe)
        params = restore_params(run.checkpoints, jax.eval_shape(model.init))
        tokens = stream(model.model, params, prompt, options.length, sampling=sampling, seed=options.seed)
        first = next(tokens)  # compiles
    for text in decode_stream(texts, prompt, itertools.chain([first], tokens)):
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
