"""The paths of a run folder, and its config.json: settings, versions, git commit and seed."""

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
# Environment variables that change results.
_VARIABLES = ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run.

    Args:
      path: The folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        """Settings, versions, git commit and seed."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def torch(self) -> Path:
        """What the PyTorch checkpoint of an imported run held besides tensors."""
        return self.path / "torch.pt"

    @property
    def replay(self) -> Path:
        """The batches of steps that ended the run, for `jaxtrain replay`."""
        return self.path / "replay"

    @property
    def report(self) -> Path:
        """The page that `jaxtrain report` writes."""
        return self.path / "report.html"

    def create(self, name: str, recipe: Recipe) -> None:
        """Create the folder and write config.json. Raises `UserError` if the operating system refuses."""
        self.make()
        self.write_config(name, recipe)

    def make(self) -> None:
        """Create the folder. Raises `UserError` if the operating system refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path} cannot be created ({error.strerror}): choose another --out") from error

    def write_config(self, name: str, recipe: Recipe) -> None:
        """Write config.json atomically. Raises `UserError` if the operating system refuses."""
        config = {"recipe": name, "settings": _plain(recipe), **environment()}
        partial = self.config.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(config, indent=2) + "\n")
            sync(partial)
            partial.replace(self.config)
        except OSError as error:
            raise UserError(f"{self.config} cannot be written ({error.strerror}): make it writable first") from error


def read_config(config: Path) -> tuple[str, Recipe]:
    """Read the name and settings of a recipe.

    Args:
      config: A config.json.

    Returns:
      A tuple (name of the recipe, the recipe with those settings).

    Raises:
      UserError: The file cannot be read, or its recipe is unknown.
    """
    try:
        written = json.loads(config.read_text())
        name, settings = written["recipe"], written["settings"]
        if isinstance(name, str) and name not in RECIPES:
            raise UserError(f"{config}: unknown recipe {name!r}: choose one of {', '.join(RECIPES)}")
        return name, dataclasses.replace(RECIPES[name], **_typed(type(RECIPES[name]), settings))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{config} cannot be read ({error!r}): restore it, or start a new run") from error


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _plain(recipe: Recipe) -> dict[str, Any]:
    settings = dataclasses.asdict(recipe)
    return {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in settings.items()}


def _typed(recipe_type: type[Recipe], settings: Mapping[str, Any]) -> dict[str, Any]:
    paths = {name for name, hint in get_type_hints(recipe_type).items() if Path in getattr(hint, "__args__", ())}
    return {k: Path(v) if k in paths and v is not None else v for k, v in settings.items()}


def environment() -> dict[str, Any]:
    """Return what else determines the numbers of a run, and when and how it was started, as JSON."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in _REPORTED},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [str(d.device_kind) for d in jax.devices()],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
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
