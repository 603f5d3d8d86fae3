"""Every internal of JAX in use is listed in one module, and the installed JAX has them all."""

import ast
import re
from pathlib import Path

import jax
import pytest

from jaxtrain.debug import installation
from jaxtrain.program import internals
from jaxtrain.program.internals import INTERNALS, Internal, missing_internals

ROOT = Path(__file__).parents[2]
FILES = [path for package in ("jaxtrain", "parity", "benchmarks") for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: internal.name)
def test_the_installed_jax_has_every_internal_in_use(internal):
    assert internal.probe()


def test_a_missing_internal_is_reported_by_the_doctor(monkeypatch):
    (found,) = installation.internals()
    assert found.status == "fine"

    missing = Internal("scan[ft_in]", "program.rewrite", lambda: {}["ft_in"])
    monkeypatch.setattr(internals, "INTERNALS", (*INTERNALS, missing))
    assert missing_internals(internals.INTERNALS) == [missing]
    (found,) = installation.internals()
    assert found.status == "problem"
    assert f"jax {jax.__version__} lacks scan[ft_in] (used by program.rewrite)" in str(found)


def private_imports(path):
    """Yield (line, module) of every import of a private module of JAX."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (
            (node.lineno, name)
            for name in names
            if name.split(".")[0] in ("jax", "jaxlib") and any(part.startswith("_") for part in name.split("."))
        )


def test_the_installed_pytorch_has_every_internal_in_use():
    torch_internals = pytest.importorskip("jaxtrain.torch_internals", exc_type=ImportError)
    assert not missing_internals(torch_internals.INTERNALS)


def test_private_names_of_pytorch_are_read_in_one_place():
    """`torch.….__file__` and the like are public; so is what is private of objects that are not PyTorch's modules."""
    private = re.compile(r"torch(\.\w+)*\._(?!_)\w+")
    found = []
    for path in FILES:
        if path.name == "torch_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [f"{path}:{node.lineno}: {name}" for name in names if private.fullmatch(name)]
    assert not found, "\n".join(found)


def test_private_modules_of_jax_are_imported_in_one_place():
    listed = Path(internals.__file__)
    found = [f"{path}:{line}: {name}" for path in FILES if path != listed for line, name in private_imports(path)]
    found += [str(path) for path in FILES if path != listed and "jax._src" in path.read_text()]
    assert not found, "\n".join(found)


READERS = [
    *(Path("jaxtrain") / "program" / f"{name}.py" for name in ("equations", "rewrite", "internals")),
    # Tables of the parameters of every primitive that is written out.
    Path("jaxtrain/export/onnx_operators.py"),
]


def test_parameters_of_equations_are_read_in_one_place():
    """Elsewhere an equation is asked by the functions of `jaxtrain.program.equations`."""
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if path.relative_to(ROOT) not in READERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "params" and EQUATION.fullmatch(ast.unparse(node.value))
    ]
    assert not found, "\n".join(found)


EQUATION = re.compile(r"(?:.*\.)?(?:_?eqns?|e|equation|inner|operation|scan|_scan|body|marked)(?:\[.*\])?")


def test_every_parameter_that_is_read_has_a_probe():
    functions = (node for path in READERS[:2] for node in ast.parse((ROOT / path).read_text()).body)
    read = {
        constant.value
        for node in functions
        if isinstance(node, ast.FunctionDef) and "params" in ast.unparse(node.body[1:] or node.body)
        for statement in node.body
        for constant in ast.walk(statement)
        if isinstance(constant, ast.Constant) and re.fullmatch(r"[a-z_]+", str(constant.value))
    }
    probed = set(re.findall(r"\w+", " ".join(internal.name for internal in INTERNALS)))
    assert read - probed == {"default"}  # the name of a branch, no parameter
    assert len(read) > 30
