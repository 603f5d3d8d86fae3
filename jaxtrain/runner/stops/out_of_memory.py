"""Explain out-of-memory errors: what could not be allocated, settings to try, and the command that finds the best ones.

Finding settings that fit takes minutes of compilation, and memory that this process lacks: `jaxtrain plan` does it in
another one.
"""

import contextlib
from collections.abc import Iterator

from jaxtrain.distributed import FSDP, parse_mesh
from jaxtrain.errors import RunFailed, UserError, is_out_of_memory
from jaxtrain.recipes import command
from jaxtrain.run import Recipe
from jaxtrain.run_folder import RunFolder


@contextlib.contextmanager
def explain_out_of_memory(name: str, recipe: Recipe, run: RunFolder) -> Iterator[None]:
    """Turn an out-of-memory error, of the host or a device, into a `RunFailed` of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        flags = flags_for_less_memory(recipe)
        if flags is None:
            line = "the micro-batch is already one example: make the model smaller"
        elif run.config.exists():
            out = f"{run.path}-smaller"
            line = f"everything saved is intact; try jaxtrain train {name} --from {run.config} --out {out} {flags}"
        else:
            line = f"nothing was written; try the same with {flags}"
        if flags is not None:
            line += f"; {command('plan', name, recipe)} shows what fits"
        raise RunFailed(f"out of memory ({reason}): {line}") from error


def flags_for_less_memory(recipe: Recipe) -> str | None:
    """Return flags with which the same update takes less memory; None if there are none left.

    They divide the batch into micro-batches at most half as large, without whole gradient sums where fsdp can divide
    them, or rematerialize blocks if a micro-batch is already one example.

    >>> from jaxtrain.recipes import RECIPES
    >>> flags_for_less_memory(RECIPES["gpt-stdlib"])
    '--accumulate 2'
    """
    finer = [k for k in range(2 * recipe.accumulate, recipe.batch_size + 1) if recipe.batch_size % k == 0]
    if finer:
        divides = recipe.gradient_sums == "whole" and parse_mesh(recipe.mesh or f"{FSDP}=1")[FSDP] > 1
        return f"--accumulate {finer[0]}{' --gradient-sums sharded' if divides else ''}"
    return "--remat full" if recipe.remat == "none" else None
