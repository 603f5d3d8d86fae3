"""Which settings a resumed run may change."""

import dataclasses
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.run import Recipe

CHANGEABLE = frozenset(
    {
        *(
            "steps",
            "log_every",
            "eval_every",
            "save_every",
            "keep_last",
            "keep_best",
            "keep_every",
            "patience",
            "workers",
        ),
        *("histograms", "max_skips", "spike_factor", "on_spike", "stall_seconds", "allow_recompile"),
        *("mesh", "accumulate", "gradient_sums", "reshard_after", "pipeline_chunks", "workers"),
    }
)
"""Settings that a resumed run may change; any other change would make it a different run."""


def check_resumed(saved: Recipe, recipe: Recipe) -> None:
    """Check the settings with which a run is resumed.

    Args:
      saved: The settings of the run.
      recipe: Those to continue with.

    Raises:
      UserError: A setting differs that a resumed run may not change.
    """
    for field in dataclasses.fields(recipe):
        before, after = getattr(saved, field.name), getattr(recipe, field.name)
        after = after.absolute() if isinstance(after, Path) else after  # as it was saved
        if before != after and field.name not in CHANGEABLE:
            raise UserError(
                f"--{field.name.replace('_', '-')} {after} differs from the run's {before}: "
                f"a resumed run may change only {', '.join(sorted(CHANGEABLE))}"
            )
