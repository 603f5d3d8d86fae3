"""`jaxtrain sample DIR`: text from a trained GPT, as it is written."""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxtrain.cli.arguments import parse
from jaxtrain.errors import UserError
from jaxtrain.recipes import GPTRecipe
from jaxtrain.runner import RunFolder
from jaxtrain.runner.checkpoint import restore_params


@dataclass(frozen=True)
class Sample:
    """Write text from a trained GPT."""

    prompt: str = "def "
    """What the text goes on from."""
    length: int = 500
    """Bytes to write."""
    temperature: float = 0.8
    """0 takes the likeliest byte every time; 1 draws as the model believes."""
    seed: int = 0
    """Of the draws."""


def main(args: list[str]) -> int:
    """Parse, restore, write."""
    if args and not args[0].startswith("-"):
        folder, args = args[0], args[1:]
    elif any(a in ("-h", "--help") for a in args):
        folder = "DIR"
    else:
        raise UserError("which run? jaxtrain sample DIR, where DIR is the folder of a trained GPT")
    asked = parse(Sample(), args, f"jaxtrain sample {folder}")
    _check(asked)
    run = RunFolder(Path(folder))
    name, recipe = run.read_recipe()
    if not isinstance(recipe, GPTRecipe):
        raise UserError(f"{run.path} holds a run of {name}, which writes no text: give one of gpt-stdlib")
    from jaxtrain.tasks.language import generate, gpt, printable

    apply, init = gpt(recipe)
    params = restore_params(run.checkpoints, jax.eval_shape(init))
    sys.stdout.write(printable(asked.prompt.encode()))
    for byte in generate(
        apply,
        params,
        recipe.seq_len,
        asked.prompt.encode(),
        asked.length,
        temperature=asked.temperature,
        seed=asked.seed,
    ):
        sys.stdout.write(printable(bytes([byte])))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _check(asked: Sample) -> None:
    if not asked.prompt:
        raise UserError("the prompt is empty: give at least one character")
    if asked.length < 1:
        raise UserError(f"length {asked.length} writes nothing: make it 1 or more")
    if asked.temperature < 0 or asked.seed < 0:
        raise UserError(f"temperature {asked.temperature} and seed {asked.seed}: make both 0 or more")
