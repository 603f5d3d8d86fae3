"""What a run that does not fit is told: what was refused, the settings to try, and the command that finds the best.

Half a micro-batch can be tried at once; which settings fit takes minutes of compiling to say, and memory that there is
none of, so that it is left to a process of its own, `jaxtrain plan`.
"""

import contextlib
from collections.abc import Iterator

from jaxtrain.errors import RunFailed, UserError, is_out_of_memory
from jaxtrain.recipes import Recipe, command
from jaxtrain.run_folder import RunFolder


@contextlib.contextmanager
def explain_out_of_memory(name: str, recipe: Recipe, run: RunFolder) -> Iterator[None]:
    """Raises `RunFailed`, one line, where the host or a device has no memory left."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        flags = flags_for_less_memory(recipe)
        if flags is None:
            line = "the micro-batch is one example already: make the model smaller"
        elif run.config.exists():
            out = f"{run.path}-smaller"
            line = f"what is saved is whole; try jaxtrain train {name} --from {run.config} --out {out} {flags}"
        else:
            line = f"nothing is written; try the same with {flags}"
        if flags is not None:
            line += f"; {command('plan', name, recipe)} says what fits"
        raise RunFailed(f"out of memory ({said}): {line}") from error


def flags_for_less_memory(recipe: Recipe) -> str | None:
    """Flags under which the same update takes less memory; None where there are none left.

    At most half the examples to a micro-batch, the same number to an update; where it is one already, blocks computed
    again instead of kept.

    >>> from jaxtrain.recipes import RECIPES
    >>> flags_for_less_memory(RECIPES["gpt-stdlib"])
    '--accumulate 2'
    """
    finer = [k for k in range(2 * recipe.accumulate, recipe.batch_size + 1) if recipe.batch_size % k == 0]
    if finer:
        return f"--accumulate {finer[0]}"
    return "--remat full" if recipe.remat == "none" else None
