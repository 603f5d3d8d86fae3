"""Plant bugs of one line all over the sources, and ask which law sees each: `python -m tests.mutation`.

The laws that execute the line run, the quickest first, in a process that has the changed module. A mutant is killed by
a law that fails, and survives if they all pass within the time. A survivor is a missing law, or no bug: a program that
computes the same, a message, a matter of speed.
"""

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from tests.mutation.mutants import Mutant, sites
from tests.mutation.reach import PATH, ROOT
from tests.tiers import SHORT, function_of, recorded


def reach_of(tests: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Return the lines that laws of continuous integration execute, by law and file.

    Args:
      tests: Files or folders whose laws are run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reach.json"
        plugins = ["-p", "tests.mutation.reach", "--tier", "change", "-m", "law", "-n0"]
        command = [sys.executable, "-m", "pytest", *plugins, *tests]
        subprocess.run(command, cwd=ROOT, env={**os.environ, PATH: str(path)}, check=False)
        found: dict[str, dict[str, list[int]]] = json.loads(path.read_text())
        return found


def planted(count: int, folders: Sequence[str], seed: str) -> list[Mutant]:
    """Return random mutants of the sources in folders, of each file about as many as it has.

    Args:
      count: How many.
      folders: Files or folders, relative to the repository.
      seed: Seed of the choice.
    """
    paths = [x for name in folders for x in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))]
    files = sorted(x.relative_to(ROOT).as_posix() for x in paths)
    texts = {file: (ROOT / file).read_text() for file in files}
    every = [site for file, text in texts.items() for site in sites(file, text)]
    random.Random(seed).shuffle(every)
    drawn = (site.mutant(texts[site.file]) for site in every)
    return [*itertools.islice((mutant for mutant in drawn if mutant is not None), count)]


class _Changed(importlib.abc.MetaPathFinder):
    """Imports a module with changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = ".".join(Path(mutant.file).with_suffix("").parts).removesuffix(".__init__")
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        path = str(ROOT / self._mutant.file)
        return importlib.util.spec_from_file_location(name, path, loader=_Source(name, path, self._mutant.source))


class _Source(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def _run(mutant: Mutant, laws: Sequence[str], path: str) -> None:
    """Run laws on a mutant, and write the first that fails."""
    import pytest

    sys.meta_path.insert(0, _Changed(mutant))
    failed: list[str] = []

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        # To rewrite assertions, pytest would read the modules of parity, which has a plugin of it, itself.
        options = ["-n0", "-x", "-p", "no:cacheprovider", "--assert=plain"]
        status = pytest.main([*options, *laws], plugins=[Failures()])
    # A module that cannot be imported any more fails before a test runs.
    Path(path).write_text(failed[0] if failed else "" if status == 0 else f"exit status {int(status)}")


def killer(mutant: Mutant, laws: Sequence[str], seconds: float) -> str:
    """Return the law that fails, "timeout" if the time is over, or "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "killer"
        process = multiprocessing.get_context("fork").Process(target=_run, args=(mutant, laws, str(path)))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return "timeout"
        # A mutant that ends the process is seen as well.
        return path.read_text() if path.exists() else f"exit code {process.exitcode}"


def laws_of(
    mutant: Mutant, reach: Mapping[str, Mapping[str, Sequence[int]]], seconds: Mapping[str, float], budget: float
) -> list[str]:
    """Return the quickest laws that execute the line of a mutant, of each test one before another case of it."""
    found = sorted(
        (seconds.get(law, SHORT / 3), law) for law, files in reach.items() if mutant.line in files.get(mutant.file, ())
    )
    order = defaultdict(list)
    for x in found:
        order[function_of(x[1])].append(x)
    rounds = [x for i in range(8) for cases in order.values() for x in cases[i : i + 1]]
    chosen, total = [], 0.0
    for took, law in rounds:
        if not chosen or total + took <= budget:
            chosen.append(law)
            total += took
    return chosen


def refuse_failing(
    every: Sequence[Mutant],
    reach: Mapping[str, Mapping[str, Sequence[int]]],
    seconds: Mapping[str, float],
    budget: float,
) -> None:
    """End the command if the laws of a mutant fail without it."""
    for mutant in every:
        if laws := laws_of(mutant, reach, seconds, 0.75 * budget):
            if found := killer(mutant._replace(source=(ROOT / mutant.file).read_text()), laws, budget):
                sys.exit(f"{found} without a mutant")
            return


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("sources", nargs="*", default=["jaxtrain"], help="files or folders of the sources")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="tests whose laws are asked")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of the laws of a mutant")
    parser.add_argument("--reach", type=Path, help="file of the lines that laws execute, written if it is missing")
    args = parser.parse_args()
    if args.reach and args.reach.exists():
        reach = json.loads(args.reach.read_text())
    else:
        reach = reach_of(args.tests)
        if args.reach:
            args.reach.write_text(json.dumps(reach))
    seconds = {law: x for law, x in recorded().items() if x is not None}
    counts = Counter[str]()
    _import_libraries()
    every = planted(args.count, args.sources, args.seed)
    refuse_failing(every, reach, seconds, args.seconds)
    for mutant in every:
        laws, start = laws_of(mutant, reach, seconds, 0.75 * args.seconds), time.monotonic()
        found = killer(mutant, laws, args.seconds) if laws else "unreached"
        outcome = found if found in ("", "unreached", "timeout") else "killed"
        counts[outcome or "survived"] += 1
        print(
            f"{outcome or 'survived':9} {time.monotonic() - start:5.1f} s  {mutant}  [{found or f'{len(laws)} laws'}]",
            flush=True,
        )
    print(dict(counts))


def _import_libraries() -> None:
    """Import what all tests import, so that each process has it; nothing of it starts a thread."""
    importlib.import_module("conftest")  # sets the environment before JAX is imported
    for name in [name for name in sys.modules if name.partition(".")[0] in ("jaxtrain", "conftest")]:
        del sys.modules[name]
    for name in ("jax", "jax.numpy", "optax", "flax", "torch", "torch.export", "transformers", "pytest"):
        importlib.import_module(name)


if __name__ == "__main__":
    main()
