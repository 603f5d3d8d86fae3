"""The order of the packages: each imports only packages above it, and only names that they export."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxtrain
import parity
from jaxtrain import passes

ROOT = Path(__file__).parents[1]
# The order, from the leaves to the commands; `jaxtrain/__init__.py` and CONTRIBUTING.md list the same one.
ORDER = (
    *(
        "errors",
        "fields",
        "flags",
        "paths",
        "interrupts",
        "records",
        "cases",
        "user_cache",
        "user_file",
        "folder_files",
        "pages",
        "compilation",
        "threefry",
        "program",
        "passes",
        "cpu",
        "step",
        "optim",
        "data",
        "interop",
    ),
    *(
        "losses",
        "models",
        "cost",
        "distributed",
        "run",
        "torch_internals",
        "torch_import",
        "recipes",
        "profile",
        "debug",
        "run_folder",
        "observe",
    ),
    *("runner", "planning", "export", "port", "cli", "labs"),
)
# What has not earned a place may read the internals of all packages; these files alone know it, each by a public name.
KNOWING_LABS = {
    "jaxtrain/__init__.py",
    "jaxtrain/distributed/sharded_step.py",
    "jaxtrain/planning/scaling.py",
    "jaxtrain/runner/loss_scales.py",
    "jaxtrain/runner/preflight.py",
    "jaxtrain/runner/start.py",
}
# Programs on top of the packages, each importing those before it.
PROGRAMS = ("jaxtrain", "parity", "benchmarks")
# `jaxtrain port` proves and times what it writes, `jaxtrain bench` times what is proved.
REACHING_UP = {("jaxtrain/cli/port.py", name) for name in ("parity.ported", "parity.long_runs", "benchmarks.ported")}
REACHING_UP |= {("jaxtrain/cli/bench.py", "benchmarks.bench")}
FILES = [path.relative_to(ROOT) for program in PROGRAMS for path in sorted((ROOT / program).rglob("*.py"))]


def module_of(file: Path) -> str:
    """Return the dotted name of a source file."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imports(file: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, imported name) of every import in a file, including nested and type-only imports."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def package_of(module: str) -> str:
    """Return the package of jaxtrain that contains a module."""
    return module.split(".")[1] if module.startswith("jaxtrain.") else ""


def public(package: str) -> set[str]:
    """Return the names in `__all__` of a package: the documented ones and its public submodules."""
    for node in ast.parse((ROOT / MODULES[f"jaxtrain.{package}"]).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def exported(package: str) -> set[str]:
    """Return the public names and those that `__init__` defines or re-exports for the other packages."""
    tree = ast.parse((ROOT / MODULES[f"jaxtrain.{package}"]).read_text())
    aliases = (alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return public(package) | defined | {alias.name for alias in aliases if alias.name == alias.asname}


def test_every_package_is_in_the_order() -> None:
    assert {package_of(module) for module in MODULES} - {""} == {*ORDER}


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_those_above_it(package: str) -> None:
    below = {*ORDER[ORDER.index(package) + 1 :]}
    wrong = [
        f"{file}:{line} imports {name or module}"
        for file in FILES
        if package_of(module_of(file)) == package
        for line, module, name in imports(file)
        if {package_of(module), name if module == "jaxtrain" else ""} & (below - {"labs"})
    ]
    assert not wrong, "\n".join(wrong)


def test_few_files_know_the_laboratories() -> None:
    knowing = {
        file.as_posix()
        for file in FILES
        for _, module, name in imports(file)
        if "labs" in (package_of(module), name if module == "jaxtrain" else "") and file.parts[1] != "labs"
    }
    assert knowing == KNOWING_LABS


def test_a_folder_of_passes_imports_only_those_above_it() -> None:
    order = re.findall(r"^(\w+) {2,}", passes.__doc__ or "", re.MULTILINE)
    rooms = {path.stem for path in (ROOT / "jaxtrain" / "passes").iterdir() if not path.name.startswith("__")}
    assert {*order} == rooms
    wrong = []
    for file in FILES:
        if file.parts[:2] == ("jaxtrain", "passes") and file.name != "__init__.py":
            below = order[order.index(Path(file.parts[2]).stem) + 1 :]
            wrong += [
                f"{file}:{line} imports {module}"
                for line, module, name in imports(file)
                if module.startswith("jaxtrain.passes") and {*module.split(".")[2:3], name} & {*below}
            ]
    assert not wrong, "\n".join(wrong)


def test_a_part_of_parity_imports_only_those_above_it() -> None:
    lines = re.findall(r"^ *((?:\w+/?, )*\w+/?) {2,}", parity.__doc__ or "", re.MULTILINE)
    order = [name.rstrip("/") for line in lines for name in line.split(", ")]
    assert {*order} == {path.stem for path in (ROOT / "parity").iterdir() if not path.name.startswith("__")}
    wrong = []
    for file in FILES:
        if file.parts[0] == "parity" and not file.parts[1].startswith("__"):
            below = order[order.index(Path(file.parts[1]).stem) + 1 :]
            wrong += [
                f"{file}:{line} imports {module}"
                for line, module, name in imports(file)
                if module.split(".")[0] == "parity" and {*[*module.split("."), name][1:2]} & {*below}
            ]
    assert not wrong, "\n".join(wrong)


def test_jaxtrain_imports_no_program_on_top_of_it() -> None:
    wrong = [
        f"{file}:{line} imports {module}"
        for file in FILES
        for line, module, _ in imports(file)
        if module.split(".")[0] in PROGRAMS[PROGRAMS.index(file.parts[0]) + 1 :]
        if (str(file), module) not in REACHING_UP
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_import_only_names_that_other_packages_export() -> None:
    wrong = []
    for file in FILES:
        own = package_of(module_of(file)) if file.parts[0] == "jaxtrain" else None
        for line, module, name in imports(file):
            package = package_of(module)
            if not package or own in (package, "labs") or f"jaxtrain.{package}" not in MODULES:
                continue
            inside = module.split(".")[2:]
            if MODULES[f"jaxtrain.{package}"].name != "__init__.py":
                continue
            used = inside[0] if inside else name
            if used and used not in exported(package):
                wrong.append(f"{file}:{line} imports {used} of jaxtrain.{package}, which does not export it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", [p for p in ORDER if MODULES[f"jaxtrain.{p}"].name == "__init__.py"])
def test_exported_names_exist(package: str) -> None:
    init = ROOT / MODULES[f"jaxtrain.{package}"]
    tree = ast.parse(init.read_text())
    defined = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    defined |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    modules = {path.stem for path in init.parent.glob("*.py")} | {
        path.parent.name for path in init.parent.glob("*/__init__.py")
    }
    assert exported(package) <= defined | modules
    assert ast.get_docstring(tree)


def imported_modules(module: str) -> set[str]:
    """Return the modules that a module imports by name, without their parent packages, which Python imports as well."""
    names = (
        f"{source}.{name}" if f"{source}.{name}" in MODULES else source for _, source, name in imports(MODULES[module])
    )
    return {name for name in names if name in MODULES} - {module}


def cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or indirectly."""
    reached = {module: set(edges[module]) for module in edges}
    for middle in edges:
        for module in edges:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    found = ({other for other in reached[module] if module in reached[other]} for module in edges)
    return list({frozenset(cycle): cycle for cycle in found if cycle}.values())


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


@pytest.mark.parametrize("program", PROGRAMS)
def test_modules_have_no_import_cycles(program: str) -> None:
    """This includes imports inside functions and for type checking."""
    edges = {module: imported_modules(module) for module in MODULES if module.split(".")[0] == program}
    found = cycles({module: imported & edges.keys() for module, imported in edges.items()})
    assert not found, "\n".join(" <-> ".join(sorted(cycle)) for cycle in found)


def test_the_package_docstring_and_contributing_list_the_order() -> None:
    """A line may list several packages with one description."""
    for text in (jaxtrain.__doc__ or "", (ROOT / "CONTRIBUTING.md").read_text()):
        lines = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)  +\S", text, re.MULTILINE)
        assert [name for line in lines for name in line.split(", ")] == [*ORDER]
