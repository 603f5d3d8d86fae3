"""PyTorch's side of a check, recorded once and replayed where PyTorch is not installed, for instance in CI.

A bundle is a folder with `bundle.json`, the settings and the machine of the recording, and the runs as safetensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxtrain.fields import brief, from_json
from jaxtrain.folder_files import open_file, read_json
from parity.case import Case
from parity.compare.low_precision import TRAININGS
from parity.compare.reference import Reference, live_reference
from parity.record import Record, Snapshot, Tensors
from parity.settings import Settings, in_double, settings_of, validate

FORMAT = 2
INDEX = "bundle.json"
_NUMBERS = ("losses", "scales", "grad_norms")


def record(case: Case, precisions: Sequence[str], folder: Path, **settings: Any) -> None:
    """Run PyTorch's side of the checks of a case and write it to a folder.

    In low precisions the trainings that repeat a failing check are recorded as well.

    Args:
      case: The case.
      precisions: Precisions to record.
      folder: Folder without a bundle.
      **settings: Fields of `parity.settings.Settings`.

    Raises:
      UserError: The folder has a bundle already, a setting does not fit the case, or a parameter is complex.
    """
    from jaxtrain.errors import UserError
    from jaxtrain.step import refuse_complex
    from parity.attestation import environment
    from parity.weights import with_tables

    given, case = settings_of(case, **settings), with_tables(case)
    refuse_complex(case.params_like, "a bundle of safetensors", "check the case where PyTorch is installed")
    for precision in precisions:
        validate(case, precision, given)
    if (folder / INDEX).exists():
        raise UserError(f"{folder} already contains a bundle: use another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for precision in precisions:
        for seed in _seeds(precision, given):
            reference = live_reference(case, precision, Settings(**{**asdict(given), "seed": seed}))
            _write(folder, f"{precision}-{seed}", reference)
    index = {"format": FORMAT, "case": case.name, "precisions": [*precisions], **asdict(given)}
    # Written last, so that a folder with an index is complete.
    (folder / INDEX).write_text(json.dumps({**index, "environment": environment()}, indent=2) + "\n")


@dataclass(frozen=True)
class Bundle:
    """A recorded bundle and the settings of its recording."""

    folder: Path
    case: str
    precisions: tuple[str, ...]
    settings: Settings

    def reference(self, precision: str, settings: Settings) -> Reference:
        """Return PyTorch's recorded runs. Raises `UserError` for settings that were not recorded."""
        from jaxtrain.errors import UserError

        recorded = asdict(self.settings)
        for name, value in asdict(settings).items():
            # Rematerialization concerns JAX only.
            if name not in ("remat", "seed") and value != recorded[name]:
                raise UserError(f"{self.folder} was recorded with {name} {recorded[name]}, not {value}")
        if precision not in self.precisions or settings.seed not in _seeds(precision, self.settings):
            raise UserError(
                f"{self.folder} contains {', '.join(self.precisions)} with seed {self.settings.seed}: use these"
            )
        return _read(self.folder, f"{precision}-{settings.seed}")


def open_bundle(folder: Path) -> Bundle:
    """Return the bundle in a folder. Raises `UserError` if there is none or its format is another."""
    from jaxtrain.errors import UserError

    index = folder / INDEX
    if not index.is_file():
        raise UserError(f"{folder} contains no {INDEX}: create it with parity record")
    try:
        content = read_json(index)
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise UserError(
                f"{folder} has bundle format {brief(content.get('format'))}, expected {FORMAT}: record it again"
            )
        found = from_json(_Index, content)
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UserError(f"{index} cannot be read ({why}): record it again") from error
    settings = Settings(found.accumulate, found.remat, found.steps, found.seed)
    return Bundle(folder, found.case, tuple(found.precisions), settings)


@dataclass(frozen=True)
class _Index:
    """The types of bundle.json."""

    case: str
    precisions: list[str]
    accumulate: int
    remat: str
    steps: int
    seed: int


def _seeds(precision: str, settings: Settings) -> range:
    return range(settings.seed, settings.seed + (1 if in_double(precision) else TRAININGS))


def _write(folder: Path, name: str, reference: Reference) -> None:
    save_file(_contiguous(reference.weights), folder / f"{name}-weights.safetensors")
    for what, run in _runs(reference):
        save_file(_flat(run), folder / f"{name}-{what}.safetensors")


def _read(folder: Path, name: str) -> Reference:
    def run(what: str) -> Record:
        return _record(_load(folder / f"{name}-{what}.safetensors"))

    def runs(what: str) -> list[Record]:
        return [run(f"{what}{i}") for i in range(len(list(folder.glob(f"{name}-{what}*.safetensors"))))]

    weights = _load(folder / f"{name}-weights.safetensors")
    return Reference(weights, run("theirs"), runs("reordered"), runs("one_ulp"), run("truth"))


def _load(path: Path) -> Tensors:
    """Read tensors. Raises `UserError` if the file cannot be read, or is a link."""
    from jaxtrain.errors import UserError

    try:
        open_file(path).close()
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read ({why}): record the bundle again") from error


def _runs(reference: Reference) -> list[tuple[str, Record]]:
    kinds = {"reordered": reference.reordered, "one_ulp": reference.one_ulp}
    others = [(f"{kind}{i}", run) for kind, runs in kinds.items() for i, run in enumerate(runs)]
    return [("theirs", reference.theirs), *others, ("truth", reference.truth)]


def _flat(run: Record) -> Tensors:
    """The arrays of a record by the path of their field, e.g. "first/moments/exp_avg/0.weight"."""
    flat: Tensors = {"losses": run.losses, "scales": run.scales, "grad_norms": run.grad_norms}
    flat |= {f"grads/{name}": x for name, x in run.grads.items()}
    for when, snapshot in {"first": run.first, "last": run.last}.items():
        for what, tensors in {"params": snapshot.params, "buffers": snapshot.buffers}.items():
            flat |= {f"{when}/{what}/{name}": x for name, x in tensors.items()}
        for moment, tensors in snapshot.moments.items():
            flat |= {f"{when}/moments/{moment}/{name}": x for name, x in tensors.items()}
    return _contiguous(flat)


def _record(flat: Mapping[str, np.ndarray]) -> Record:
    def below(prefix: str) -> Tensors:
        return {path.removeprefix(prefix): x for path, x in flat.items() if path.startswith(prefix)}

    def snapshot(when: str) -> Snapshot:
        names = {path.split("/")[2] for path in flat if path.startswith(f"{when}/moments/")}
        moments = {name: below(f"{when}/moments/{name}/") for name in sorted(names)}
        return Snapshot(below(f"{when}/params/"), moments, below(f"{when}/buffers/"))

    from jaxtrain.errors import UserError

    if missing := [name for name in _NUMBERS if name not in flat]:
        raise UserError(f"the bundle has no {missing[0]}: record it again")
    numbers = {name: flat[name] for name in _NUMBERS}
    return Record(grads=below("grads/"), first=snapshot("first"), last=snapshot("last"), **numbers)


def _contiguous(tensors: Mapping[str, np.ndarray]) -> Tensors:
    return {name: np.asarray(x, order="C") for name, x in tensors.items()}
