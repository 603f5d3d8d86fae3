"""`jaxtrain port SCRIPT`: a PyTorch training script, unmodified, as a recipe that is proved to be the same run."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.fields import Count, field_errors
from jaxtrain.flags import parse
from jaxtrain.user_file import script_file, with_hash_seed

COMMAND = "jaxtrain port [--updates N] [--out DIR] SCRIPT|-m MODULE [the script's own arguments]"


@dataclass(frozen=True)
class Port:
    """Record a PyTorch training script, write it as a recipe, and prove that both are the same run.

    The script runs as by `python SCRIPT` or `python -m MODULE` for a few updates, then it is stopped. All that follows
    its name is its own.
    """

    updates: Count = 20
    """Number of updates that are recorded and proved."""
    out: Path = Path("port")
    """Folder of the files; it must be empty or new."""


def main(args: list[str]) -> int:
    """Record, understand, write, prove; print what was found."""
    flags, script, own = _split(args)
    options = parse(Port(), flags, COMMAND.partition(" SCRIPT")[0])
    if errors := field_errors(options):
        raise UserError(errors[0])
    if script is None:
        raise UserError(f"a script is required: {COMMAND}")
    try:
        script_file(script)
    except UserError:
        raise UserError(f"{script} does not exist: {COMMAND}") from None
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(f"{options.out} exists and is not empty: choose another folder with --out")
    _with_hash_seed()
    return _port(options, script, own)


def _with_hash_seed() -> None:
    """Begin this process anew with the hashes that the script has whenever it gives a run its batches.

    The order of a set of strings, as of a vocabulary, depends on them, and is another one in every process.
    """
    if "PYTHONHASHSEED" not in os.environ and sys.argv[1:2] == ["port"]:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_hash_seed())


def _split(args: list[str]) -> tuple[list[str], Path | None, list[str]]:
    """Split arguments into the command's flags, the script or module, and its own arguments."""
    i = 0
    while i < len(args) and args[i].startswith("-") and args[i] != "-m":
        i += 1 if "=" in args[i] or args[i] in ("-h", "--help") else 2
    flags, given = args[:i], args[i:]
    if given[:1] == ["-m"]:  # Path.cwd() / "package.module" stands for the module
        return flags, Path.cwd() / given[1] if len(given) > 1 else None, given[2:]
    return flags, Path(given[0]) if given else None, given[1:]


def _port(options: Port, script: Path, args: Sequence[str]) -> int:
    """Record, understand, write and prove."""
    from benchmarks.ported import speed  # benchmarks and parity are above jaxtrain, for those who have them
    from jaxtrain.port.data import keep_loaders
    from jaxtrain.port.fed import check_fed
    from jaxtrain.port.kept_files import kept_files
    from jaxtrain.port.ported import ported
    from jaxtrain.port.rerun import check_rerun
    from jaxtrain.port.script import record
    from jaxtrain.port.understand import understood
    from jaxtrain.port.write import write
    from parity.long_runs import long_runs
    from parity.ported import prove

    _say("recording", f"{script}, {options.updates} updates; what it prints follows")
    with tempfile.TemporaryDirectory(prefix="jaxtrain-port-") as kept, kept_files(Path(kept)):
        recording = record(script, args, options.updates)
    keep_loaders(script, args, [found.loader for found in recording.loaders])
    training = understood(recording)
    for name, text in _found(training):
        _say(name, text)
    check_rerun(training)
    _say("rerun", "losses, gradients and parameters again from the recorded calls: the bits of the script")
    result = ported(training)
    for name, text in _of_evaluation(result):
        _say(name, text)
    options.out.resolve().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".port-", dir=options.out.resolve().parent))
    try:
        written = write(result, script, args, folder)
        if training.cut is not None:
            check_fed(training, script, args, folder)
            _say("batches", "given by the script, whatever its model computes")
        proof = prove(result, folder, script.name.removesuffix(".py"))
        _say("proof", *proof.lines)
        runs = long_runs(result, folder, script, args, proof) if proof.passed else None
        if runs is not None:
            _say("behaviour", *runs.lines)
            _say("speed", speed(result, folder, script, args))
        written.append(folder / "proof.html")
        if options.out.exists():
            options.out.rmdir()
        os.replace(folder, options.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _say("wrote", "  ".join(str(options.out / file.name) for file in written))
    run = f"{options.out / 'run.py'}::Run"
    _say("next", f"jaxtrain train {run}        jaxtrain plan {run} --device h100")
    return 0 if proof.passed and runs is not None and runs.passed else 1


def _of_evaluation(result: Any) -> Iterator[tuple[str, str]]:
    """Yield what the model is evaluated on, as (name, line)."""
    if result.validation is not None:
        line = result.training.recording.loaders[result.validation].line
        yield "validation", f"the loss on the DataLoader of {Path(line.file).name}:{line.number}"
    elif result.not_evaluated is not None:
        yield "left out", f"the script's evaluation: {result.not_evaluated}"


def _say(name: str, *lines: str) -> None:
    for title, line in zip([name, *[""] * len(lines)], lines, strict=False):
        print(f"{title:<10} {line}", flush=True)


def _found(training: Any) -> Iterator[tuple[str, str]]:
    """Yield what was found, as (name, line)."""
    turns, updates = training.of_turns, len(training.recording.updates)
    calls = " and ".join(f"{len(turn.programs[0][0].program.calls)} calls" for turn in turns)
    programs = "one program" if len(turns) == 1 else f"{len(turns)} programs"
    count = sum(p.numel() for p in training.parameters().values())
    sizes = sum(len(turn.programs) for turn in turns)
    yield (
        "recorded",
        f"{updates} updates: {programs} of {calls} of functions and modules, {count:,} parameters; "
        f"{sizes} batch shape{'s' * (sizes > 1)}",
    )
    trainings = [part for turn in turns for part in turn.parts]
    clips = [part.clip for part in trainings if part.clip is not None] or [t.clip for t in turns if t.clip is not None]
    parts = [
        *(type(part).__name__ for part in training.modules.values()),
        *(f"{type(p.optimizer).__name__} lr {p.recording.updates[0].settings[0]['lr']:g}" for p in trainings),
        *dict.fromkeys(
            f"{type(p.scheduler).__name__} by {'epoch' if p.is_by_epoch else 'update'}"
            for p in trainings
            if p.scheduler is not None
        ),
        *(["rates of the script"] if training.cut is not None and training.cut.rates else []),
        *([f"autocast {str(training.autocast).removeprefix('torch.')}"] if training.autocast else []),
        *(["GradScaler"] if training.is_scaled else []),
        *([f"accumulate {training.accumulate}"] if training.accumulate > 1 else []),
        *dict.fromkeys(f"{clip.function.strip('_')} {clip.bound:g}" for clip in clips),
        *(["parameters are clamped"] if any(turn.clamps for turn in turns) else []),
    ]
    yield "found", " · ".join(parts)
    for turn in turns:
        if turn.cut is not None and (carried := [*turn.cut.carried]):
            yield "carried", f"{', '.join(carried)}, from update to update"
        if turn.cut is not None and turn.cut.numbers:
            yield "input", f"{', '.join(x.name for x in turn.cut.numbers)}, which differ by update"
    reads = dict.fromkeys(line for update in training.recording.updates for b in update.backwards for line in b.reads)
    for clip in (turn.clip for turn in turns if turn.clip is not None and turn.clips_scaled):
        at = f"{Path(clip.line.file).name}:{clip.line.number}"
        yield "seen", f"scaled gradients are clipped ({at}), which is carried over: call GradScaler.unscale_ before"
    for line in reads:
        yield "seen", f"a value of a tensor is read ({Path(line.file).name}:{line.number}); no update depends on it"
    for line in training.left_out():
        yield "left out", f"parameters are read ({Path(line.file).name}:{line.number}); no loss depends on the result"
