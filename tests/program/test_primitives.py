"""Every primitive of the installed JAX has its place in each table of primitives, and is evaluated by each rewriter."""

import ast
import importlib
import re
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.ad_checkpoint
import jax.custom_batching
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.special
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

from jaxtrain.cost.flops import flops
from jaxtrain.passes.numerics.autocast_lists import ARITHMETIC, AS_TRACED, LISTS, UNLISTED, Dtype
from jaxtrain.program import equations, operations, rewrite
from parity.oracle.in_jax import in_float64

KERNELS = ("jax._src.pallas", "jax._src.cudnn", "jax._src.thunky", "jax.experimental")
"""Modules whose primitives exist only within a kernel, or are bound by an experimental interface."""


def names_of_primitives():
    """Return the names of JAX's public primitives, and of all others in the modules that `import jax` loads."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "jax" and not name.startswith(KERNELS)]
    found = {value for module in [primitives, *modules] for value in vars(module).values() if _is_primitive(value)}
    return {primitive.name for primitive in found}


OWN = {
    "biased_product",
    "fp8_cast",
    "fp8_product",
    "fused_attention",
    "fused_attention_backward",
    "scaled_product",
    "pallas_call",
}
EARLIER = {"call", "checkpoint", "closed_call", "pjit"}
SINCE_0_12 = {"log2", "one_minus_square", "polynomial"}
EXPERIMENTAL = {"xla_metadata_call"}
TABLES = {
    "export.onnx_operators": ("OPERATORS",),
    "passes.numerics.autocast_lists": ("CPU", "CUDA", "ARITHMETIC"),
    "program.rewrite": ("HIGHER_ORDER",),
}


def known_names():
    """Return the names of the primitives of this JAX, of the other versions that are supported, and of this project."""
    return names_of_primitives() | OWN | EARLIER | EXPERIMENTAL | (set() if hasattr(lax, "polynomial") else SINCE_0_12)


@pytest.mark.parametrize("module", TABLES)
def test_every_name_in_a_table_is_that_of_a_primitive(module):
    """A primitive that JAX renames would otherwise leave its table without a word."""
    for table in TABLES[module]:
        assert {*getattr(importlib.import_module(f"jaxtrain.{module}"), table)} <= known_names(), table


def test_every_operation_has_the_name_of_a_primitive():
    named = {value for name, value in vars(operations).items() if name.isupper() and isinstance(value, str)}
    assert len(named) > 100
    assert named <= known_names()


def test_equations_are_taken_apart_in_one_place():
    """Elsewhere an operation is a constant of `program.operations`, and `program.equations` returns the equations."""
    names, found = known_names() - OWN, []
    for path in FILES:
        file = str(path.relative_to(ROOT))
        if file.startswith("jaxtrain/program/") or file in BY_NAME:
            continue
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "jaxtrain.program"]
        imported = {x.name for node in imports for x in node.names}
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("eqns", "primitive"):
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else []
            literals = {x.value for x in compared if isinstance(x, ast.Constant) and isinstance(x.value, str)}
            if literals & names and imported & {"equations", "operations"} and (file, *literals) != PARAMETER:
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


PARAMETER = ("jaxtrain/torch_import/source/compare.py", "name")
"""A literal that is the name of a parameter too."""
ROOT = Path(__file__).parents[2]
FILES = [path for package in ("jaxtrain", "parity", "benchmarks") for path in sorted((ROOT / package).rglob("*.py"))]
BY_NAME = {"jaxtrain/passes/numerics/autocast_lists.py", "jaxtrain/export/onnx_operators.py"}
"""Tables of what is done with every primitive."""


def _is_primitive(value):
    return isinstance(value, Primitive)


def test_autocast_has_a_rule_for_every_primitive():
    names = names_of_primitives()
    assert len(names) > 200
    tables = {
        **LISTS,
        "as traced": AS_TRACED,
        "unlisted": UNLISTED,
        "with a program of their own": rewrite.HIGHER_ORDER,
    }
    assert names - {name for table in tables.values() for name in table} == set()
    for name in names:
        rules = [kind for kind, table in tables.items() if name in table and kind != "cpu"]
        assert len(rules) == 1, (name, rules)


X = np.random.default_rng(0).permutation(np.linspace(0.05, 0.9, 12, dtype=np.float32)).reshape(3, 4)


def _window(x, start, combine):
    return lax.reduce_window(x, np.asarray(start, x.dtype), combine, (2, 2), (1, 1), "VALID")


def _triangular(x):
    return jnp.eye(3, dtype=x.dtype) + x[:, :3]


USUAL = (
    *(lax.abs, lax.acos, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.cbrt, lax.ceil),
    *(lax.cos, lax.cosh, lax.cumlogsumexp, lax.cummax, lax.cummin, lax.cumprod, lax.cumsum, lax.erf),
    *(lax.erf_inv, lax.erfc, lax.exp, lax.exp2, lax.expm1, lax.floor, lax.log, lax.log1p, jnp.log2),
    *(lax.logistic, lax.neg, jnp.max, jnp.min, jnp.prod, jnp.sum, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sinh),
    *(lax.sort, lax.sqrt, lax.square, lax.tan, lax.tanh),
    lambda x: lax.acosh(1 + x),
    lambda x: lax.clamp(jnp.full_like(x, 0.2), x, jnp.full_like(x, 0.7)),
    lambda x: jnp.fft.rfft(x).real,
    lambda x: lax.integer_pow(x, 3),
    lambda x: _window(x, -np.inf, lax.max),
    lambda x: _window(x, np.inf, lax.min),
    lambda x: _window(x, 0, lax.add),
    lambda x: x.at[0].add(x[1]),
    lambda x: x.at[0].subtract(x[1]),
    lambda x: x.at[0].max(x[1]),
    lambda x: x.at[0].min(x[1]),
    lambda x: x.at[0].multiply(x[1]),
    lambda x: lax.top_k(x, 2)[0],
    # Gradients.
    jax.grad(lambda x: jnp.tanh(x).sum()),
    jax.grad(lambda x: _window(x, -np.inf, lax.max).sum()),
    # Of two arrays.
    *(lambda x, fn=fn: fn(x, x[::-1]) for fn in (lax.add, lax.atan2, lax.div, lax.max, lax.min)),
    *(lambda x, fn=fn: fn(x, x[::-1]) for fn in (lax.min, lax.mul, lax.pow, lax.rem, lax.sub)),
    lambda x: jnp.where(x > x[::-1], x, x[::-1]),
    # Products and decompositions.
    lambda x: x @ x.T,
    lambda x: lax.ragged_dot(x, jnp.stack([x.T, 2 * x.T]), jnp.array([1, 2])),
    lambda x: lax.conv_general_dilated(x[None], x[:, :3, None], (1,), "VALID"),
    lambda x: lax.linalg.cholesky(_triangular(x) @ _triangular(x).T),
    lambda x: lax.linalg.lu(_triangular(x))[0],
    lambda x: abs(jnp.linalg.qr(_triangular(x))[1]),
    lambda x: lax.linalg.eigh(_triangular(x) + _triangular(x).T)[1],
    lambda x: jnp.linalg.svd(_triangular(x), compute_uv=False),
    lambda x: jax.scipy.linalg.solve_triangular(_triangular(x), x),
    # Since JAX 0.12.
    *([lambda x: lax.polynomial(x, [1.0, x[0, 0], 2.0])] if hasattr(lax, "polynomial") else []),
)
SPECIAL = (
    *(lax.bessel_i0e, lax.bessel_i1e, lax.digamma, lax.lgamma),
    *(lambda x, fn=fn: fn(x, x[::-1]) for fn in (lax.igamma, lax.igammac)),
    lambda x: lax.betainc(x, x[::-1], x / 2),
    lambda x: lax.polygamma(jnp.ones_like(x), x),
    lambda x: lax.zeta(1 + x, x[::-1]),
)
SAMPLES = (*USUAL, *SPECIAL)
"""Functions of an array [3, 4] of numbers between 0 and 1; the special ones are compiled slowly."""

ELSEWHERE = {
    *("cholesky_update", "eig", "geqp3", "geqrf", "hessenberg", "householder_product", "ormqr", "schur"),
    *("symmetric_product", "tridiagonal", "tridiagonal_solve", "add_any", "igamma_grad_a"),
}
"""Primitives without a sample: steps of decompositions, and the sums of gradients."""


def emitted(fn, *args):
    def names(traced):
        for eqn in traced.eqns:
            yield eqn.primitive.name
            for inner in equations.inner_jaxprs(eqn):
                yield from names(inner)

    return set(names(jax.make_jaxpr(fn)(*args).jaxpr))


def test_every_primitive_of_arithmetic_has_a_sample():
    computing = names_of_primitives() & (ARITHMETIC | {*LISTS["cuda"]})
    assert computing - ELSEWHERE - {name for fn in SAMPLES for name in emitted(fn, X)} == set()


@pytest.mark.parametrize("samples", [USUAL, SPECIAL], ids=["usual", "special"])
def test_every_primitive_is_computed_in_float64(samples):
    """The oracle's results for float32 are those of the same functions of float64."""

    def all_samples(x):
        return [fn(x) for fn in samples]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = np.asarray(X, np.float64)
        truth, found = jax.jit(all_samples)(x), jax.jit(in_float64(lambda x: all_samples(x.astype(np.float32))))(x)
    for fn, a, b in zip(samples, truth, found, strict=True):
        names = emitted(fn, X)
        assert a.dtype == b.dtype == np.float64, names
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-13, err_msg=str(names))


def test_an_evaluation_without_a_rule_is_the_function():
    def all_samples(x):
        return [fn(x) for fn in SAMPLES]

    interpreted = rewrite.transform(all_samples, lambda eqn, args, run: None)
    with jax.numpy_dtype_promotion("standard"):
        programs = [jax.jit(fn).lower(X).as_text() for fn in (all_samples, interpreted)]
    operations = [Counter(re.findall(r"(?:stablehlo|chlo)\.\w+", text)) for text in programs]
    assert operations[0] == operations[1]


def test_products_are_computed_in_low_precision_and_counted():
    counted = 0
    for fn in SAMPLES:
        listed = [LISTS["cuda"].get(name) for name in emitted(fn, X)]
        if Dtype.LOW in listed:
            counted += 1
            assert flops(fn, X) > 0
        else:
            assert flops(fn, X) == 0
    assert counted == 4  # with the product from which cholesky's sample is computed
