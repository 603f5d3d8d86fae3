"""A run's folder: config.json, metrics.jsonl, checkpoints/, tensorboard/, report.html,
result.json, replay/, and the lock on it.
"""

import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, get_type_hints

import jax

from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES, Recipe
from jaxtrain.runner.checkpoint import steps
from jaxtrain.runner.manifest import sync
from jaxtrain.runner.preflight import check_settings

_REPORTED = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")
# Settings of JAX's from outside that change bits.
_VARIABLES = ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL")


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
    def replay(self) -> Path:
        """Batches of the steps that ended the run, for `jaxtrain replay`."""
        return self.path / "replay"

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
        if steps(self.checkpoints):
            raise UserError(f"{self.path} has checkpoints but no config.json: put it back, or choose another --out")
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            raise UserError(f"{parent} cannot be written: choose another --out")

    def create(self, name: str, recipe: Recipe) -> None:
        """Make the folder and write config.json. Raises `UserError` where the system refuses."""
        self.make()
        self.write_config(name, recipe)

    def make(self) -> None:
        """Make the folder. Raises `UserError` where the system refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path} cannot be made ({error.strerror}): choose another --out") from error

    def write_config(self, name: str, recipe: Recipe) -> None:
        """Write config.json, whole or not at all. Raises `UserError` where the system refuses."""
        config = {"recipe": name, "settings": _plain(recipe), **environment()}
        partial = self.config.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(config, indent=2) + "\n")
            sync(partial)
            partial.replace(self.config)
        except OSError as error:
            raise UserError(f"{self.config} cannot be written ({error.strerror}): mend that first") from error

    def read_recipe(self) -> tuple[str, Recipe]:
        """(name, recipe) of the run. Raises `UserError` where there is none to read, or one that no run can have."""
        if not self.config.exists():
            raise UserError(f"{self.path} holds no run: start one with jaxtrain train --out {self.path}")
        name, recipe = read_recipe(self.config)
        check_settings(recipe)
        return name, recipe


class RunLock:
    """A run's folder held by one process, until it ends, however it ends: the kernel lets go of the lock, not we.

    It is on the file `lock` in the folder, which says who took it last and is never deleted: to lock a file that
    another process is about to delete would lock nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._file is not None

    def take(self) -> None:
        """Lock the folder. Raises `UserError` where another process holds it."""
        try:
            file = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self._path} cannot be written ({error.strerror}): choose another --out") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.write(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            holder = os.read(file, 1000).decode(errors="replace").strip() or "another process"
            os.close(file)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(
                    f"{self._path} is in use by {holder}: wait for it, stop it, or choose another --out"
                ) from error
            raise UserError(f"{self._path} cannot be locked ({error.strerror}): choose another --out") from error
        self._file = file


def read_recipe(config: Path) -> tuple[str, Recipe]:
    """(name, recipe) of a config.json. Raises `UserError` for one that cannot be read."""
    try:
        written = json.loads(config.read_text())
        name, settings = written["recipe"], written["settings"]
        return name, dataclasses.replace(RECIPES[name], **_typed(type(RECIPES[name]), settings))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{config} cannot be read ({error!r}): restore it, or start a new run") from error


def _plain(recipe: Recipe) -> dict[str, Any]:
    settings = dataclasses.asdict(recipe)
    return {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in settings.items()}


def _typed(recipe_type: type[Recipe], settings: Mapping[str, Any]) -> dict[str, Any]:
    paths = {name for name, hint in get_type_hints(recipe_type).items() if Path in getattr(hint, "__args__", ())}
    return {k: Path(v) if k in paths and v is not None else v for k, v in settings.items()}


def environment() -> dict[str, Any]:
    """What besides the settings decides the numbers of a run, and when and how it was started."""
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
