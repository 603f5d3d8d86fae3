"""Which settings a resumed run may change."""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.data import digest_of
from jaxtrain.errors import UserError
from jaxtrain.fields import brief
from jaxtrain.run import Recipe, Task
from jaxtrain.run_folder import RunFolder, plain_settings
from jaxtrain.step import option_names

_FILES = 1000  # of a folder of data, whose times are compared

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
        *("histograms", "max_skips", "spike_factor", "on_spike", "stall_seconds", "mesh"),
        *option_names(changeable=True),
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


def saved_settings(recipe: Recipe, task: Task) -> dict[str, Any]:
    """Return what a checkpoint holds of the settings that a resumed run may not change, and of its data."""
    settings = {name: value for name, value in plain_settings(recipe).items() if name not in CHANGEABLE}
    paths = [value for value in vars(recipe).values() if isinstance(value, Path)]
    files = {str(path.absolute()): _stamp(path) for path in paths}
    digests = {name: digest_of(getattr(task, name)) for name in ("train", "validation")}
    arrays = {name: digest for name, digest in digests.items() if digest is not None}
    return {"recorded": {"settings": settings, "files": files, "arrays": arrays}}


def check_saved(saved: Mapping[str, Any], now: Mapping[str, Any], recipe: Recipe, run: RunFolder) -> list[str]:
    """Compare the settings that a checkpoint was trained with to those of config.json, which may have been edited.

    Args:
      saved: What the checkpoint holds besides the state, with `saved_settings`.
      now: `saved_settings` of the resumed run.
      recipe: The settings of the resumed run.
      run: The folder of the run.

    Returns:
      Lines that name the data which were modified.

    Raises:
      UserError: A setting differs.
    """
    now, recorded = now["recorded"], saved.get("recorded", {})
    before, files, arrays = (recorded.get(name, {}) for name in ("settings", "files", "arrays"))
    for name, value in now["settings"].items():
        is_path = isinstance(getattr(recipe, name), Path)  # data may move; its files are compared below
        if name in before and before[name] != value and not is_path:
            raise UserError(
                f"{run.config} sets {name} to {brief(value)}, but the run was trained with {brief(before[name])}: "
                "set it back, or start a new run with another --out"
            )
    changed = [f"{path} was modified" for path, stamp in now["files"].items() if files.get(path, stamp) != stamp]
    changed += [
        f"the arrays of Task.{name} were modified"
        for name, digest in now["arrays"].items()
        if arrays.get(name, digest) != digest
    ]
    remark = "after the run was saved: results may differ from those of an uninterrupted run"
    return [f"{what} {remark}" for what in changed]


def _stamp(path: Path) -> str:
    """Return a digest of names, sizes and times of a file, or of the files of a folder: of a large one, the first."""
    files = [path] if path.is_file() else itertools.islice((p for p in path.rglob("*") if p.is_file()), _FILES)
    stamps = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(repr(stamps).encode("utf-8", "surrogateescape")).hexdigest()
