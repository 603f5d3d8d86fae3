"""`jaxtrain sample DIR`: text from a trained language model, as it is written."""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console

from jaxtrain.cli.arguments import parse
from jaxtrain.errors import UserError
from jaxtrain.recipes import LanguageRecipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_params


@dataclass(frozen=True)
class Sample:
    """Write text from a trained language model."""

    prompt: str = "def "
    """What the text goes on from."""
    length: int = 500
    """Bytes, or tokens, to write."""
    temperature: float = 0.8
    """0 takes the likeliest token every time; 1 draws as the model believes."""
    seed: int = 0
    """Of the draws."""


def main(args: list[str]) -> int:
    """Parse, restore, write."""
    if args and not args[0].startswith("-"):
        folder, args = args[0], args[1:]
    elif any(a in ("-h", "--help") for a in args):
        folder = "DIR"
    else:
        raise UserError("which run? jaxtrain sample DIR, where DIR is the folder of a trained language model")
    asked = parse(Sample(), args, f"jaxtrain sample {folder}")
    _check(asked)
    run = RunFolder(Path(folder))
    name, recipe = read_recipe(run)
    if not isinstance(recipe, LanguageRecipe):
        raise UserError(f"{run.path} holds a run of {name}, which writes no text: give one of a language model")
    from jaxtrain.data import tokenizer
    from jaxtrain.tasks.language import decoder, generate, printable

    texts = tokenizer(recipe.tokenizer)
    tokens, shown = texts.encode(asked.prompt).tolist(), ""
    with Console(stderr=True).status(f"reading {run.path}"):
        apply, init, _ = decoder(recipe)
        params = restore_params(run.checkpoints, jax.eval_shape(init))
        written = generate(
            apply,
            params,
            recipe.seq_len,
            list(tokens),
            asked.length,
            temperature=asked.temperature,
            seed=asked.seed,
        )
        first = next(written)  # for which it is compiled
    for token in itertools.chain([first], written):
        tokens.append(token)
        # A character may be of several tokens: until it is whole it decodes to U+FFFD.
        text = texts.decode(tokens).rstrip("\ufffd")
        sys.stdout.write(printable(text[len(shown) :]))
        sys.stdout.flush()
        shown = text
    sys.stdout.write("\n")
    return 0


def _check(asked: Sample) -> None:
    if not asked.prompt:
        raise UserError("the prompt is empty: give at least one character")
    if asked.length < 1:
        raise UserError(f"length {asked.length} writes nothing: make it 1 or more")
    if asked.temperature < 0 or asked.seed < 0:
        raise UserError(f"temperature {asked.temperature} and seed {asked.seed}: make both 0 or more")
