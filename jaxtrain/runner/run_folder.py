"""A run's folder: config.json, metrics.jsonl, checkpoints/, tensorboard/, report.html."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import jax

from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES, Recipe

_REPORTED = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """Settings, versions, git commit, seed."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """orbax's folder of steps."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def torch(self) -> Path:
        """Of a run that began in PyTorch: what its checkpoint held besides tensors."""
        return self.path / "torch.pt"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.path / "report.html"

    def check_free(self) -> None:
        """Raises `UserError` where the folder holds a run already, or cannot be written."""
        if self.config.exists():
            raise UserError(f"{self.path} already holds a run: continue it with --resume, or choose another --out")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file: choose another --out")
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            raise UserError(f"{parent} cannot be written: choose another --out")

    def create(self, name: str, recipe: Recipe) -> None:
        """Make the folder and write config.json. Raises `UserError` where the system refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config(name, recipe)
        except OSError as error:
            raise UserError(f"{self.path} cannot be made ({error.strerror}): choose another --out") from error

    def write_config(self, name: str, recipe: Recipe) -> None:
        """Write config.json, whole or not at all."""
        config = {"recipe": name, "settings": _plain(recipe), **_environment()}
        partial = self.config.with_suffix(".partial")
        partial.write_text(json.dumps(config, indent=2) + "\n")
        partial.replace(self.config)

    def read_recipe(self) -> tuple[str, Recipe]:
        """(name, recipe) of the run. Raises `UserError` where there is none to read."""
        if not self.config.exists():
            raise UserError(f"{self.path} holds no run: start one with jaxtrain train --out {self.path}")
        try:
            config = json.loads(self.config.read_text())
            name, settings = config["recipe"], config["settings"]
            return name, dataclasses.replace(RECIPES[name], **_typed(type(RECIPES[name]), settings))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.config} cannot be read ({error!r}): restore it, or start a new run") from error


def _plain(recipe: Recipe) -> dict[str, Any]:
    settings = dataclasses.asdict(recipe)
    return {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in settings.items()}


def _typed(recipe_type: type[Recipe], settings: Mapping[str, Any]) -> dict[str, Any]:
    paths = {name for name, hint in get_type_hints(recipe_type).items() if Path in getattr(hint, "__args__", ())}
    return {k: Path(v) if k in paths and v is not None else v for k, v in settings.items()}


def _environment() -> dict[str, Any]:
    return {
        "versions": {name: importlib.metadata.version(name) for name in _REPORTED},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [str(d.device_kind) for d in jax.devices()],
        "git_commit": _git_commit(),
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
