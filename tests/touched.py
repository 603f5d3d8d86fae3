"""How far each file of tests is from a change, by the graph of imports."""

import re
import subprocess
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxtrain", "parity", "benchmarks", "tests", "docs")


def in_last_commits() -> set[str]:
    """Return the files that the branch changed since it left origin/main; on main, in the day up to its last commit."""
    base = git("merge-base", "HEAD", "origin/main")
    if not base or base == git("rev-parse", "HEAD"):
        seconds = int(git("log", "-1", "--format=%ct") or 0)
        base = git("rev-list", "-1", f"--before={seconds - 24 * 3600}", "HEAD")
    changed = git("diff", "--name-only", base, "HEAD") if base else ""
    return {*changed.splitlines(), *git("diff", "--name-only", "HEAD").splitlines()}


def distances(changed: Collection[str]) -> dict[str, int]:
    """Return the number of imports between each file that reaches a changed one, and the nearest of these.

    Args:
      changed: Files, relative to the repository.
    """
    importers: dict[str, set[str]] = {}
    for file in files():
        for imported in imports(file):
            importers.setdefault(imported, set()).add(file)
    found = dict.fromkeys(sorted(changed), 0)
    nearest = [*found]
    for file in nearest:  # grows: breadth first
        for importer in sorted(importers.get(file, ())):
            if importer not in found:
                found[importer] = found[file] + 1
                nearest.append(importer)
    return found


@cache
def files() -> tuple[str, ...]:
    """Return all source files, relative to the repository."""
    return tuple(sorted(x.relative_to(ROOT).as_posix() for folder in FOLDERS for x in (ROOT / folder).rglob("*.py")))


@cache
def imports(file: str) -> set[str]:
    """Return the files that a file imports, where it imports a name the one that defines it."""
    text = _STRING.sub("", (ROOT / file).read_text())
    return {found for module, name in names(text) if (found := defining(module, name)) is not None} - {file}


# Parsing all files takes every worker five seconds.
_STRING = re.compile(r'""".*?"""', re.DOTALL)
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) )?import (?:\(([^)]*)\)|(.*))", re.MULTILINE)
_NAME = re.compile(r"([\w.]+)(?: as (\w+))?")
_ATTRIBUTE = re.compile(r"(?<![\w.])(\w+)\.(\w+)")


def names(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a source imports or reads of an imported module; "" for the module itself."""
    modules = {}
    for module, several, one in _IMPORT.findall(text):
        for name, alias in _NAME.findall(re.sub("#.*", "", several or one)):
            yield (module, name) if module else (name, "")
            modules[alias or name] = f"{module}.{name}" if module else name
    for name, attribute in set(_ATTRIBUTE.findall(_IMPORT.sub("", text))):
        if name in modules:
            yield modules[name], attribute


@cache
def defining(module: str, name: str) -> str | None:
    """Return the file of a module, or of the module that a name comes from which it re-exports."""
    if name and (inside := file_of(f"{module}.{name}")) is not None:
        return inside
    file = file_of(module)
    if file is None or not name or not file.endswith("__init__.py"):
        return file
    return next(
        (
            defining(origin, original)
            for origin, several, one in _IMPORT.findall((ROOT / file).read_text())
            for original, alias in _NAME.findall(several or one)
            if origin not in ("", module) and (alias or original) == name
        ),
        file,
    )


@cache
def file_of(module: str) -> str | None:
    """Return the file of a module; None if it is another project's."""
    path = module.replace(".", "/")
    return next((x for x in (f"{path}.py", f"{path}/__init__.py") if x in _set()), None)


@cache
def _set() -> frozenset[str]:
    return frozenset(files())


def git(*arguments: str) -> str:
    """Return what a command of git prints; "" if it fails, as outside a repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
