"""Plant bugs of one line all over the sources, and ask which law sees each: `python -m tests.mutation`.

What is measured is whether the laws of its area see a bug within a minute. The bug is planted in a copy of the
repository. The laws that executed its line run first, of those that continuous integration draws of this commit, and
other cases of these tests; then those of tests that executed another line of the file, the nearest line first; then all
others, those of the nearest files by the graph of imports first. Of each group the quickest run first, by the time that
the cases of a test take together; a test of a few lines, often that of the function, takes none. A mutant is killed by
a law that fails, and passes without it. It survives if all pass that the time holds; "timeout" is a first law that
takes all of it. A survivor is a missing law, or no bug: a program that computes the same, a message, a matter of speed.
"""

import argparse
import compileall
import contextlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant, sites
from tests.mutation.reach import PATH, ROOT
from tests.tiers import SHORT, file_of, function_of, recorded
from tests.touched import FOLDERS, distances


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


class _Laws:
    """A pytest plugin that runs laws in their order while the time holds them, and writes the first that fails."""

    def __init__(self, laws: Mapping[str, float], end: float, path: Path) -> None:
        self._laws, self._end, self._path = laws, end, path
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {law: i for i, law in enumerate(self._laws)}
        items[:] = sorted((x for x in items if x.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() + self._laws[item.nodeid] > self._end:
            pytest.skip("no time")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pytest_collectreport(report)
        if report.when == "teardown":
            self._path.write_text(self.failed)

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        # A module that cannot be imported any more fails before a test runs.
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _run(root: Path, laws: Mapping[str, float], end: float, path: Path) -> None:
    """Run laws on the repository in root, and write the first that fails."""
    os.setsid()
    os.chdir(root)
    sys.path[:] = [str(root), *(x for x in sys.path if x not in ("", str(ROOT)))]
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    _forget(*FOLDERS, "conftest")
    plugin, status = _Laws(laws, end, path), pytest.ExitCode.OK
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        # To rewrite assertions, pytest would read the modules of parity, which has a plugin of it, itself.
        options = ["-n0", "-x", "-p", "no:cacheprovider", "--assert=plain"]
        for some in itertools.batched(laws, _TOGETHER):  # type: ignore[attr-defined]  # importing the files of all laws would take the time
            if time.monotonic() < end and not plugin.failed and status in _PASSED:
                status = pytest.ExitCode(pytest.main([*options, *some], plugins=[plugin]))
    path.write_text(plugin.failed if plugin.failed or status in _PASSED else f"exit status {int(status)}")


_TOGETHER = 12
_PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def killer(root: Path, mutant: Mutant, laws: Mapping[str, float], seconds: float) -> str:
    """Return the law that fails, "timeout" if the first takes all the time, or "" if those pass that it holds.

    Args:
      root: A copy of the repository, in which the mutant is planted meanwhile: other processes that laws start have it.
      mutant: A changed source file.
      laws: The seconds that laws take without it, in the order in which they run.
      seconds: Seconds that they may take; a law that needs more than are left does not run.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, _planted(root, mutant):
        path = Path(folder) / "killer"
        process = multiprocessing.get_context("fork").Process(target=_run, args=(root, laws, end, path))
        process.start()
        process.join(seconds)
        if process.is_alive():
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        elif process.exitcode:  # a mutant that ends the process is seen as well
            return f"exit code {process.exitcode}"
        return path.read_text() if path.exists() else "timeout"


def fails_without(root: Path, mutant: Mutant, found: str, laws: Mapping[str, float], seconds: float) -> bool:
    """Return whether a law, or a file of laws, fails without the mutant, so that it says nothing about it.

    Args:
      root: As `killer`.
      mutant: A changed source file.
      found: What `killer` returned.
      laws: The laws that it ran.
      seconds: As `killer`.

    Raises:
      SystemExit: Nothing runs without it either, as where `--reach` has laws that there are no more.
    """
    original, is_law = mutant._replace(source=(ROOT / mutant.file).read_text()), found.startswith("tests/")
    if found not in _WITHOUT:
        without = "" if found == "timeout" else killer(root, original, {found: 0.0} if is_law else laws, seconds)
        _WITHOUT[found] = without != "" if is_law else without == found
    if _WITHOUT[found] and not is_law:
        raise SystemExit(f"{found} without a bug: delete the file of --reach, and see that the laws run")
    return _WITHOUT[found]


_WITHOUT: dict[str, bool] = {}


@contextlib.contextmanager
def _planted(root: Path, mutant: Mutant) -> Iterator[None]:
    path = root / mutant.file
    before = path.read_text()
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()  # of a file of the same second and size Python would run it
    path.write_text(mutant.source)
    try:
        yield
    finally:
        path.write_text(before)


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Yield a copy of the repository, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "repository"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv"))
        if (ROOT / ".git").exists():
            (root / ".git").symlink_to(ROOT / ".git")
        compileall.compile_dir(root, quiet=2)
        yield root


def laws_of(
    mutant: Mutant, reach: Mapping[str, Mapping[str, Sequence[int]]], seconds: Mapping[str, float], budget: float
) -> dict[str, float]:
    """Return the seconds of the laws of a mutant, in the order in which they run.

    Args:
      mutant: A changed source file.
      reach: The lines that laws execute, by law and file.
      seconds: How long laws take; the others take little.
      budget: Seconds of the laws together.
    """
    nearness, executed, sizes = distances([mutant.file]), defaultdict[str, set[int]](set), Counter[str]()
    for law, files in reach.items():
        executed[function_of(law)].update(files.get(mutant.file, ()))
        sizes[function_of(law)] = max(sizes[function_of(law)], sum(map(len, files.values())))
    order: dict[tuple[bool, int], dict[str, list[tuple[int, float, str]]]] = defaultdict(lambda: defaultdict(list))
    for law, files in reach.items():
        lines, far = executed[function_of(law)], nearness.get(file_of(law))
        if lines or far is not None:
            apart = min((abs(line - mutant.line) for line in lines), default=far or 0)
            drawn = 0 if mutant.line in files.get(mutant.file, ()) else 2 if files else 1
            order[not lines, apart][function_of(law)].append((drawn, seconds.get(law, SHORT / 3), law))
    chosen: dict[str, float] = {}
    for near in sorted(order):
        cases = [
            (i * took * min(1.0, (sizes[test] or _LINES) / _LINES), took, law)
            for test, of_test in order[near].items()
            for i, (_, took, law) in enumerate(sorted(of_test), 1)
        ]
        for _, took, law in sorted(cases):
            if took <= (budget - sum(chosen.values())) / 2:  # a long one leaves time for others
                chosen[law] = took
    return chosen


_LINES = 1000
"""Lines of the sources from which a test is no longer one of a few functions, which takes no time."""


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
    with copied() as root:
        for mutant in planted(args.count, args.sources, args.seed):
            laws, start = laws_of(mutant, reach, seconds, args.seconds), time.monotonic()
            found = killer(root, mutant, laws, args.seconds)
            while found and fails_without(root, mutant, found, laws, args.seconds):
                laws = {law: x for law, x in laws.items() if found not in (law, file_of(law))}
                found = killer(root, mutant, laws, args.seconds)
            outcome = found if found == "timeout" else "killed" if found else "survived"
            counts[outcome] += 1
            took = time.monotonic() - start
            print(f"{outcome:9} {took:5.1f} s  {mutant}  [{found or f'{len(laws)} laws'}]", flush=True)
    print(dict(counts))


def _import_libraries() -> None:
    """Import what all tests import, so that each process has it; nothing of it starts a thread."""
    importlib.import_module("conftest")  # sets the environment before JAX is imported
    _forget("jaxtrain", "conftest")
    for name in ("jax", "jax.numpy", "optax", "flax", "torch", "torch.export", "transformers"):
        importlib.import_module(name)


def _forget(*packages: str) -> None:
    """Import packages again when they are needed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


if __name__ == "__main__":
    main()
