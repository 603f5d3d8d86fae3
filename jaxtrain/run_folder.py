"""The paths of a run folder, and its config.json: settings, versions, git commit and seed."""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import jax

from jaxtrain.errors import UserError, escape_unprintable, reason
from jaxtrain.fields import from_json
from jaxtrain.folder_files import read_file, read_json, write_file
from jaxtrain.recipes import RECIPES, named_recipe
from jaxtrain.run import Recipe, file_of, is_reference, locate, name_of, source_of

_REPORTED = ("jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")
# Entries of config.json that determine the numbers of a run.
_DETERMINING = ("recipe", "source", "settings", "versions", "python", "platform", "devices", "variables", "git_commit")
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
    def source(self) -> Path:
        """Copy of the file of the run's recipe, if it is a user's own."""
        return self.path / "recipe.py"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def media(self) -> Path:
        """Images, audio, texts and tables that lines of metrics.jsonl name."""
        return self.path / "media"

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

    @property
    def written(self) -> tuple[Path, ...]:
        """What a run writes besides config.json."""
        files = self.source, self.metrics, self.path / "facts.json", self.path / "result.json", self.report
        return (*files, self.media, self.checkpoints, self.tensorboard, self.replay)

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
        """Write config.json, and the copy of the recipe's file.

        What it recorded before is kept in its list "earlier", if anything that determines the numbers has changed.

        Raises:
          UserError: The operating system refuses, or the file that is there cannot be read.
        """
        config = {"recipe": name, **_source(name), "settings": plain_settings(recipe), **environment()}
        if self.config.is_symlink() or self.config.exists():
            config["earlier"] = _earlier(recorded_config(self.config), config)
        if is_reference(name):
            _write(self.source, source_of(name))
        _write(self.config, f"{json.dumps(config, indent=2)}\n".encode())


def _earlier(before: dict[str, Any], now: Mapping[str, Any]) -> list[Any]:
    """Return what a config.json keeps of the one that it replaces."""
    kept = before.pop("earlier", [])
    is_same = all(before.get(key) == now.get(key) for key in _DETERMINING)
    return kept if is_same else [*kept, before]


def default_folder(name: str) -> RunFolder:
    """Return the folder of a run whose folder is not given: runs/NAME, for a reference the name of its class."""
    return RunFolder(Path("runs", name_of(name) if is_reference(name) else name))


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises `UserError` if the operating system refuses."""
    try:
        write_file(path, content, flush=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): make it writable first") from error


@dataclass(frozen=True, kw_only=True)
class _Config:
    """The types of the entries of a config.json."""

    recipe: str
    settings: dict[str, Any]
    source: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    python: str = ""
    platform: str = ""
    git_commit: str | None = None
    started: str = ""
    earlier: list[dict[str, Any]] = field(default_factory=list)


def recorded_config(config: Path) -> dict[str, Any]:
    """Read a config.json.

    Args:
      config: The file.

    Returns:
      Its entries: at least "recipe" and "settings".

    Raises:
      UserError: The file cannot be read, or an entry has another type.
    """
    with _reading(config):
        written: dict[str, Any] = read_json(config)
        from_json(_Config, written)
        return written


def read_config(config: Path, named: str | None = None, usage: str = "--resume --out {folder}") -> tuple[str, Recipe]:
    """Read the name and settings of a recipe.

    Args:
      config: A config.json.
      named: FILE.py::NAME that replaces a recorded reference with the same NAME, whose file may have moved.
      usage: Flags of the `jaxtrain train` command that a message suggests if the file does not exist.

    Returns:
      A tuple (name of the recipe, the recipe with those settings). Fields that were not recorded have their defaults.

    Raises:
      UserError: The file cannot be read, its recipe is unknown, or the recipe does not have one of the settings.
    """
    written = recorded_config(config)
    name = written["recipe"]
    recorded = written.get("source", {}).get("file") if is_reference(name) else None
    if is_reference(name) and recorded is None:
        raise UserError(f"{config} does not record the file of {name}: restore it, or start a new run")
    if recorded is not None:
        is_same = named is not None and is_reference(named) and name_of(named) == name_of(name)
        name = named if named is not None and is_same else locate(name, recorded)
        if not file_of(name).is_file():
            flags = usage.format(folder=config.parent)
            raise UserError(
                f"{file_of(name)}, the recipe of {config}, does not exist: restore it, or if it has moved use "
                f"jaxtrain train NEW.py::{name_of(name)} {flags}"
            )
        if name != named:
            _announce(name, written["source"].get("sha256"))
    elif name not in RECIPES:
        raise UserError(f"{config}: unknown recipe {name!r}: choose one of {', '.join(RECIPES)}")
    return name, read_settings(config, type(named_recipe(name)))


def _announce(reference: str, sha256: str | None) -> None:
    """Print which file is about to be run: the user did not name it, a run folder did."""
    is_same = hashlib.sha256(source_of(reference)).hexdigest() == sha256
    file = escape_unprintable(str(file_of(reference).resolve()))
    changed = "" if is_same else ", which has changed since the run used it"
    print(f"jaxtrain: running {file}{changed}", file=sys.stderr, flush=True)


def read_settings(config: Path, kind: type[Recipe]) -> Recipe:
    """Read the settings of a config.json as a recipe of the class `kind`; fields not recorded have their defaults.

    Raises:
      UserError: The file cannot be read, or the class does not have one of the settings.
    """
    settings = recorded_config(config)["settings"]
    unknown = settings.keys() - {field.name for field in dataclasses.fields(kind) if field.init}
    if unknown:
        raise UserError(
            f"{kind.__name__} has no field {', '.join(sorted(unknown))}, which {config} sets: add it to the recipe "
            f"again, or delete it from {config.name}"
        )
    with _reading(config):
        return kind(**_typed(kind, settings))


@contextlib.contextmanager
def _reading(config: Path) -> Iterator[None]:
    """Turn the errors of reading a config.json into a `UserError`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{config} cannot be read ({reason(error)}): restore it, or start a new run") from error


def source_change(run: RunFolder, name: str) -> str | None:
    """Describe how the file of a user's recipe differs from the one that the run used; None if it does not.

    Args:
      run: The folder of the run.
      name: The recipe's name as `read_config` returned it.
    """
    recorded = recorded_config(run.config).get("source", {}).get("sha256") if is_reference(name) else None
    after = source_of(name) if recorded else b""
    if not recorded or hashlib.sha256(after).hexdigest() == recorded:
        return None
    if not run.source.exists():
        return f"{file_of(name)} has changed since the run used it, and {run.source} is missing"
    with _reading(run.source):
        before = read_file(run.source)
    return f"{file_of(name)} has changed since the run used it: {_difference(before, after)}"


def _difference(before: bytes, after: bytes) -> str:
    """Describe the difference of two files in a line: numbers of lines, and the first one that differs."""
    old, new = (text.decode(errors="replace").splitlines() for text in (before, after))
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [(i, j, k, end) for tag, i, j, k, end in codes if tag != "equal"]
    if not changed:
        return "only the ends of lines"
    removed, added = sum(j - i for i, j, *_ in changed), sum(end - k for *_, k, end in changed)
    i, _, k, end = changed[0]
    first = f"line {k + 1} is now {new[k].strip()!r}" if k < end else f"line {i + 1}, {old[i].strip()!r}, was removed"
    return f"{added} line{'s' * (added != 1)} added, {removed} removed; {first}"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _source(name: str) -> dict[str, Any]:
    """Return where the recipe of a reference is defined, and the hash of that file."""
    if not is_reference(name):
        return {}
    return {"source": {"file": str(file_of(name).resolve()), "sha256": hashlib.sha256(source_of(name)).hexdigest()}}


def plain_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe as JSON has them."""
    settings = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe) if field.init}
    plain = {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in settings.items()}
    return dict(json.loads(json.dumps(plain)))


def environment_changes(config: Mapping[str, Any]) -> list[str]:
    """Describe how the environment that a config.json records, which affects a run's bits, differs from this one.

    Args:
      config: Its entries, as `recorded_config` returned them.
    """

    def flat(of: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: of[name] for name in ("python", "devices") if name in of}
        return {**named, **of.get("versions", {}), **of.get("variables", {})}

    there, here = flat(config), flat(environment())
    return [f"{k} {there.get(k)}, here {here.get(k)}" for k in {**there, **here} if there.get(k) != here.get(k)]


def _typed(recipe_type: type[Recipe], settings: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(recipe_type)

    def typed(hint: Any, value: Any) -> Any:
        if Path in (hint, *get_args(hint)) and value is not None:
            return Path(value)
        return tuple(value) if get_origin(hint) is tuple and isinstance(value, list) else value

    return {name: typed(hints[name], value) for name, value in settings.items()}


def environment() -> dict[str, Any]:
    """Return what else determines the numbers of a run, and when and how it was started, as JSON."""
    return {
        # A checkout that is not installed has no metadata; the package imports this module.
        "versions": {
            "jaxtrain": sys.modules["jaxtrain"].__version__,
            **{name: importlib.metadata.version(name) for name in _REPORTED},
        },
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
