"""`jaxtrain report DIR…`: an HTML page with curves, settings and samples of one run or of several runs."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxtrain.errors import UserError, escape_unprintable
from jaxtrain.flags import Flag, parse
from jaxtrain.observe import HOST, read_record, render_report, report_server, write_report
from jaxtrain.run_folder import RunFolder

PORT = 8417


@dataclass(frozen=True)
class Report:
    """Write one HTML page about a run, or a comparison of several; the runs may still be in progress."""

    folders: Annotated[tuple[str, ...], Flag(positional=True, metavar="DIR")] = ()
    """The folders of the runs."""
    out: Path | None = None
    """The page; DIR/report.html by default, or comparison.html in the current folder for several runs."""
    serve: Annotated[int | None, Flag(metavar="PORT", bare=lambda: PORT)] = None
    """Serve the page to a browser on this machine and update it while the runs continue, instead of writing it."""


def main(args: list[str]) -> int:
    """Parse, read, then write or serve."""
    options = parse(Report(), args, "jaxtrain report")
    if not options.folders:
        raise UserError("a run folder is required: jaxtrain report DIR… [--out PAGE.html] [--serve [PORT]]")
    runs = [RunFolder(Path(folder)) for folder in dict.fromkeys(options.folders)]
    if options.serve is not None:
        if options.out is not None:
            raise UserError(f"--out {options.out} and --serve are mutually exclusive: use one of them")
        return _serve(runs, options.serve)
    out = options.out or (runs[0].report if len(runs) == 1 else Path("comparison.html"))
    records = [read_record(run) for run in runs]
    try:
        write_report(out, records)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): choose another --out") from error
    for record in records:
        best = f", best validation loss {record.best.eval_loss:.4f} at step {record.best.step}" if record.best else ""
        print(escape_unprintable(f"{record.name} · {record.config['recipe']} · step {record.step}{best}"))
    print(f"page  {escape_unprintable(str(out))}")
    return 0


def _serve(runs: Sequence[RunFolder], port: int) -> int:
    """Serve the page until Ctrl-C."""
    live_page = lambda: render_report([read_record(run) for run in runs], live=True)  # noqa: E731
    live_page()  # reports unreadable files at once
    with report_server(port, lambda: _stamp(runs), live_page) as server:
        print(f"http://{HOST}:{server.server_address[1]}/  (Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _stamp(runs: Sequence[RunFolder]) -> str:
    """Return a digest that changes whenever a file shown on the page changes."""
    files = [
        path
        for run in runs
        for path in (
            run.config,
            run.metrics,
            run.path / "result.json",
            *sorted((run.path / "eval").glob("*.worst.json")),
        )
        if path.exists() and not path.is_symlink()
    ]
    stats = [(str(path), stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
