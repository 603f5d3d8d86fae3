"""`jaxtrain report DIR…`: a page of curves, settings and samples, of one run or of several beside each other."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from jaxtrain.cli.arguments import parse
from jaxtrain.errors import UserError
from jaxtrain.observe import HOST, read_record, render_report, report_server, write_report
from jaxtrain.run_folder import RunFolder

PORT = 8417


@dataclass(frozen=True)
class Report:
    """Write one HTML page about a run, or about several beside each other, running or not."""

    out: Path | None = None
    """The page; DIR/report.html of one run by default, comparison.html here of several."""
    serve: Annotated[int | None, tyro.conf.arg(metavar="[PORT]")] = None
    """Instead of writing it show the page to this machine's browser, ever anew while the runs go on."""


def main(args: list[str]) -> int:
    """Parse, read, then write or serve."""
    folders = args[: next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))]
    asked = parse(Report(), _with_port(args[len(folders) :]), "jaxtrain report DIR…")
    if not folders:
        raise UserError("which run? jaxtrain report DIR… [--out PAGE.html] [--serve [PORT]]")
    runs = [RunFolder(Path(folder)) for folder in dict.fromkeys(folders)]
    if asked.serve is not None:
        if asked.out is not None:
            raise UserError(f"--out {asked.out} with --serve: one of them, a page is either written or served")
        return _serve(runs, asked.serve)
    out = asked.out or (runs[0].report if len(runs) == 1 else Path("comparison.html"))
    records = [read_record(run) for run in runs]
    try:
        write_report(out, records)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): choose another --out") from error
    for record in records:
        best = (
            f", best validation loss {record.best['eval_loss']:.4f} at step {record.best['step']}"
            if record.best
            else ""
        )
        print(f"{record.name} · {record.config['recipe']} · step {record.step}{best}")
    print(f"page  {out}")
    return 0


def _with_port(flags: list[str]) -> list[str]:
    """The flags, with the port that --serve alone means."""
    said: list[str] = []
    for flag, following in pairwise([*flags, "--"]):
        said += [flag, str(PORT)] if flag == "--serve" and following.startswith("-") else [flag]
    return said


def _serve(runs: Sequence[RunFolder], port: int) -> int:
    """Until Ctrl-C."""
    live_page = lambda: render_report([read_record(run) for run in runs], live=True)  # noqa: E731
    live_page()  # what cannot be read is told at once
    with report_server(port, lambda: _stamp(runs), live_page) as server:
        print(f"http://{HOST}:{server.server_address[1]}/  until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _stamp(runs: Sequence[RunFolder]) -> str:
    """Another one whenever a file that the page is made of is another."""
    files = [
        path
        for run in runs
        for path in (
            run.config,
            run.metrics,
            run.path / "result.json",
            *sorted((run.path / "eval").glob("*.worst.json")),
        )
        if path.exists()
    ]
    stats = [(str(path), stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
