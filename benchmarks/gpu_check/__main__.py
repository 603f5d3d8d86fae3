"""`deploy/gpu-check [--parts 1-4] [--rehearse] [FOLDER]`."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.gpu_check.parts import PARTS, ROOM_S, TOTAL_S, Part
from benchmarks.gpu_check.process import run_limited
from benchmarks.gpu_check.summary import summary
from jaxtrain.errors import UserError
from jaxtrain.flags import Flag, parse

MACHINE_LIMIT_S = 60.0
REHEARSAL = 4.0
"""Factor of the limits in a rehearsal."""


@dataclass(frozen=True)
class GpuCheck:
    """Check and measure a GPU in parts, each with a time limit of its own."""

    folder: Annotated[Path, Flag(positional=True, metavar="FOLDER")] = Path(os.environ.get("OUT", "gpu-check"))
    """Folder of results.jsonl, summary.md and the parts' logs; by default $OUT, else gpu-check."""
    parts: str | None = None
    """Parts to run, such as 1-4 or 2,5; by default all."""
    rehearse: bool = False
    """Run the same code on a CPU, at tiny sizes, whose figures mean nothing."""


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the command.

    Args:
      argv: Arguments; None takes those of the process.
      parts: The parts that there are.

    Returns:
      The exit status: 0 if all parts are done, 1 if one failed or was stopped, 2 for wrong usage.
    """
    try:
        options = parse(GpuCheck(), list(sys.argv[1:] if argv is None else argv), "deploy/gpu-check")
        return _run(options, _selected(options.parts, parts))
    except UserError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("gpu-check: interrupted; the results so far are in the folder", file=sys.stderr)
        return 130


def _selected(text: str | None, parts: Sequence[Part]) -> list[Part]:
    """Return the parts of "1-4" or "2,5", in their order; all for None."""
    if text is None:
        return [*parts]
    chosen: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if not first.strip().isdecimal() or (last and not last.strip().isdecimal()):
            raise UserError(f"--parts {text!r} is no list of numbers: write, for example, --parts 1-4")
        chosen |= {*range(int(first), int(last or first) + 1)}
    if not chosen or not chosen <= {part.number for part in parts}:
        raise UserError(f"--parts {text!r}: there are the parts {', '.join(str(part.number) for part in parts)}")
    return [part for part in parts if part.number in chosen]


class Record:
    """The results in a folder: a line each, and the summary of all.

    Args:
      folder: The folder; results of earlier calls stay.
      titles: Titles of the parts.
    """

    def __init__(self, folder: Path, titles: Mapping[int, str]) -> None:
        self.lines, self.page, self.titles = folder / "results.jsonl", folder / "summary.md", titles

    def add(self, part: int, what: str, **figures: Any) -> None:
        """Append a result and write the summary."""
        with self.lines.open("a") as file:
            file.write(json.dumps({"part": part, "what": what, **figures}) + "\n")
        results = [json.loads(line) for line in self.lines.read_text().splitlines()]
        self.page.write_text(summary(results, self.titles))


def _run(options: GpuCheck, parts: Sequence[Part]) -> int:
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{options.folder} cannot be made ({error.strerror}): name another folder") from error
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    if options.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
    record = Record(options.folder, {part.number: part.title for part in PARTS} | {x.number: x.title for x in parts})
    begin = time.monotonic()
    _say("the machine")
    machine = _machine(options, environment)
    record.add(0, **machine, rehearsal=options.rehearse)
    outcomes = []
    for part in parts:
        left = TOTAL_S - (time.monotonic() - begin)
        # A CPU of few cores starts programs slowly.
        limit_s = part.limit_s * REHEARSAL if options.rehearse else min(part.limit_s, left)
        outcomes.append(_part(part, limit_s, options, environment, record))
    _say(f"results in {options.folder}/summary.md and results.jsonl")
    return int(any(outcome != "done" for outcome in outcomes))


def _machine(options: GpuCheck, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the environment. Raises `UserError` if it has no GPU and this is no rehearsal."""
    found: list[dict[str, Any]] = []
    log = options.folder / "machine.log"
    outcome = run_limited(("-m", "benchmarks.gpu_check.machine"), MACHINE_LIMIT_S, log, found.append, environment)
    if not found:
        raise UserError(f"the machine cannot be asked: {outcome}; {log} has the rest")
    if not options.rehearse and found[0]["platform"] != "gpu":
        raise UserError(f"JAX runs on the {found[0]['platform']} here: use a machine with a GPU, or --rehearse")
    return found[0]


def _part(part: Part, limit_s: float, options: GpuCheck, environment: Mapping[str, str], record: Record) -> str:
    """Run a part within its limit, write its results as they come, and return how it ended."""
    _say(f"{part.number}. {part.title}, at most {limit_s:.0f} s")
    record.add(part.number, "start", title=part.title)
    begin = time.monotonic()
    arguments = [*part.arguments, *(["--rehearse"] if options.rehearse else [])]
    arguments += ["--seconds", str(limit_s - ROOM_S)] if part.is_paced else []
    log = options.folder / f"part-{part.number}.log"

    def on_result(found: dict[str, Any]) -> None:
        record.add(part.number, **found)

    outcome = run_limited(arguments, limit_s, log, on_result, environment)
    seconds = time.monotonic() - begin
    record.add(part.number, "end", outcome=outcome, seconds=seconds)
    _say(f"   {outcome}, {seconds:.0f} s")
    return outcome


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
