"""The float64 runs compute nothing in lower precision, whatever dtypes the models request."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import lax
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import jaxtrain
from jaxtrain.errors import UserError
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.program.equations import inner_jaxprs
from parity import check
from parity.case import AdamW, Case
from parity.oracle.in_jax import JAX_WIDER, in_float64
from parity.oracle.in_torch import TORCH_WIDER, InFloat64
from parity.oracle.literal import written_number


class LowResults(TorchDispatchMode):
    """Counts the operations that return a tensor of less than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outs = func(*args, **(kwargs or {}))
        self.count += any(isinstance(x, torch.Tensor) and x.dtype in TORCH_WIDER for x in tree_leaves(outs))
        return outs


def low_results(jaxpr: Any) -> list[str]:
    """The primitives of `jaxpr` that return less than float64, except those of random draws."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") != "_bernoulli" and eqn.primitive.name != "bitcast_convert_type":
            low = any(getattr(v.aval, "dtype", None) in JAX_WIDER for v in eqn.outvars)
            found += [eqn.primitive.name] * low
            found += [name for inner in inner_jaxprs(eqn) for name in low_results(inner)]
    return found


@pytest.fixture
def x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def relative(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == theirs.dtype == np.float64
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_llama_in_double_computes_nothing_in_float32() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).double()
        tokens = torch.randint(50, (2, 9))

    with LowResults() as plain:
        low_loss = model(tokens, labels=tokens).loss
    with LowResults() as below, InFloat64(), LowResults() as above:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    assert plain.count > 30
    assert (below.count, above.count) == (0, 0)
    assert (low_loss.dtype, loss.dtype) == (torch.float32, torch.float64)
    assert 0 < abs(low_loss.item() / loss.item() - 1) < 1e-6


X = np.linspace(-1.3, 1.7, 12).reshape(3, 4)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * x,
        lambda x: x.to(torch.bfloat16) * 3,
        lambda x: x.half() @ x.T,
        lambda x: x.type_as(torch.ones(1, dtype=torch.float32)) / 3,
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.sum(0, dtype=torch.float32),
        lambda x: x * torch.full((4,), 0.1, dtype=torch.float32),
        lambda x: x * torch.tensor(0.1, dtype=torch.float32),
        lambda x: x * torch.ones(4) / torch.arange(1, 5),
        lambda x: x * (torch.arange(1, 5) / 3),
        lambda x: x * 10000.0 ** -(torch.arange(0, 4, dtype=torch.float32) / 4),
        lambda x: torch.polar(torch.ones(4, dtype=torch.float32), torch.arange(4.0)).real * x,
        lambda x: torch.view_as_real(torch.view_as_complex(x.float().reshape(3, 2, 2)) * 1j),
        lambda x: x.masked_fill(x < 0, torch.finfo(torch.float32).min).softmax(-1),
    ],
)
def test_every_lower_dtype_in_pytorch_yields_float64(
    program: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def in_double(x: torch.Tensor) -> torch.Tensor:
        """Run the program with float64 in place of every lower dtype it requests."""
        low = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "complex64")}
        wide = {"complex64": torch.complex128}
        methods = {name: getattr(torch.Tensor, name) for name in ("float", "half")}
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            for name in low:
                setattr(torch, name, wide.get(name, torch.float64))
            for name in methods:
                setattr(torch.Tensor, name, torch.Tensor.double)
            return program(x)
        finally:
            torch.set_default_dtype(default)
            for name, dtype in low.items():
                setattr(torch, name, dtype)
            for name, method in methods.items():
                setattr(torch.Tensor, name, method)

    theirs, ours = torch.tensor(X, requires_grad=True), torch.tensor(X, requires_grad=True)
    expected = in_double(theirs)
    expected.square().sum().backward()
    with LowResults() as low, InFloat64():
        value = program(ours)
        value.square().sum().backward()
    assert low.count == 0
    assert relative(value.detach(), expected.detach()) < 1e-15
    assert relative(ours.grad, theirs.grad) < 1e-15


def test_autocast_regions_and_low_precision_tensors_are_widened() -> None:
    x, kept = torch.tensor(X), torch.linspace(0, 1, 4)
    with InFloat64(), torch.autocast("cpu", torch.bfloat16):
        product = (x * kept[None]) @ x.T
    np.testing.assert_allclose(product, (X * kept.numpy().astype(np.float64)) @ X.T, rtol=1e-15)
    assert torch.ones(1).dtype == torch.float32, "the default dtype is back"


def test_integers_booleans_and_indices_are_untouched() -> None:
    with InFloat64():
        dtypes = [x.dtype for x in (torch.arange(3), torch.tensor([True]), torch.ones(3).argmax(), torch.ones(2).int())]
    assert dtypes == [torch.int64, torch.bool, torch.int64, torch.int32]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x, low: low.add_(x), r"aten.add_.Tensor writes to a float32 tensor \[4\]"),
        (lambda x, low: x.float().view(torch.int32), r"aten.view.dtype to torch.int32 reads the bits of a number"),
        (lambda x, low: x * low.requires_grad_(), r"a float32 tensor \[4\] is trained"),
    ],
)
def test_operations_that_pytorch_cannot_widen_raise(program: Callable[..., Any], expected: str) -> None:
    kept = torch.ones(4)
    with InFloat64(), pytest.raises(UserError, match=expected):
        program(torch.ones(4, dtype=torch.float64), kept)


def _scan(x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        return carry * 0.9 + row, carry.astype(jnp.bfloat16)

    carry, ys = lax.scan(step, jnp.zeros(4, jnp.float32), x.astype(jnp.float32))
    return carry + ys.sum(0)


def _while(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, c: c * 0.7 + 0.1, x.astype(jnp.float32))


def _cond(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda a: a * jnp.float32(0.1), lambda a: jnp.zeros_like(a), x.astype(jnp.float32))


@jax.custom_jvp
def _cube(x: Any) -> Any:
    return x.astype(jnp.float32) ** 3


@_cube.defjvp
def _cube_jvp(primals: Any, tangents: Any) -> Any:
    return _cube(*primals), 0.3 * (primals[0] * tangents[0]).astype(
        jnp.float32
    )  # not the derivative of a cube, to show that it is used


@jax.custom_vjp
def _square(x: Any) -> Any:
    return x.astype(jnp.float16) ** 2


_square.defvjp(
    lambda x: (_square(x), x.astype(jnp.float32)),
    lambda kept, g: ((kept * 0.7 * g.astype(jnp.float32)),),
)


def _torch_scan(x: Any) -> Any:
    carry, ys = torch.zeros(4, dtype=torch.float64), []
    for row in x:
        ys.append(carry)
        carry = carry * 0.9 + row
    return carry + sum(ys)


class Surrogate(torch.autograd.Function):
    """`value(x)` with the derivative `slope(x)`."""

    @staticmethod
    def forward(ctx: Any, x: Any, value: Any, slope: Any) -> Any:
        ctx.save_for_backward(slope(x))
        return value(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.saved_tensors[0] * g, None, None


PROGRAMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "astype": (lambda x: x.astype(jnp.float16) * 3, lambda x: x * 3),
    "literal": (lambda x: x.astype(jnp.float32) * 0.1 + 1e-6, lambda x: x * 0.1 + 1e-6),
    "root": (lambda x: x.astype(jnp.float32) * 24**-0.5, lambda x: x * 24**-0.5),
    "gelu": (lambda x: jax.nn.gelu(x.astype(jnp.float32)), lambda x: F.gelu(x, approximate="tanh")),
    "iota": (lambda x: x * 10000.0 ** (jnp.arange(4.0, dtype=jnp.float32) / 3)[None], None),
    "constant": (lambda x: x.astype(jnp.float32) * np.array([0.5, 1, 2, 3], np.float32)[None], None),
    "einsum": (lambda x: jnp.einsum("ij,kj->ik", x, x, preferred_element_type=jnp.float32), lambda x: x @ x.T),
    "algorithm": (
        lambda x: jnp.dot(x.astype(jnp.float32), x.T, precision=lax.DotAlgorithmPreset.F32_F32_F32),
        lambda x: x @ x.T,
    ),
    "rounding": (lambda x: lax.reduce_precision(x.astype(jnp.float32), 8, 7), lambda x: x * 1),
    "complex": (lambda x: jnp.abs(x.astype(jnp.complex64) + 0.3j), lambda x: (x**2 + 0.09) ** 0.5),
    "scatter": (lambda x: x.astype(jnp.float32).at[0, 1].add(0.1), None),
    "reduce": (
        lambda x: lax.reduce(x.astype(jnp.float32), np.float32(0), lambda a, b: a + b, (0,)),
        lambda x: x.sum(0),
    ),
    "jit": (lambda x: jax.jit(lambda y: y.astype(jnp.float32) / 3)(x), lambda x: x / 3),
    "checkpoint": (lambda x: jax.checkpoint(lambda y: jnp.sin(y.astype(jnp.float32)))(x), lambda x: torch.sin(x)),
    "scan": (_scan, _torch_scan),
    "while": (_while, lambda x: ((x * 0.7 + 0.1) * 0.7 + 0.1) * 0.7 + 0.1),
    "cond": (_cond, lambda x: x * 0.1),
    "scan of scan": (lambda x: lax.map(lambda row: _scan(row[None]), x.astype(jnp.float32)), lambda x: x * 1),
    "custom_jvp": (_cube, lambda x: Surrogate.apply(x, lambda x: x**3, lambda x: 0.3 * x)),
    "custom_vjp": (_square, lambda x: Surrogate.apply(x, lambda x: x**2, lambda x: 0.7 * x)),
    "softmax": (lambda x: jax.nn.softmax(x.astype(jnp.float32), -1), lambda x: x.softmax(-1)),
}
PROGRAMS["iota"] = PROGRAMS["iota"][0], lambda x: x * 10000.0 ** (torch.arange(4) / 3)
PROGRAMS["constant"] = PROGRAMS["constant"][0], lambda x: x * torch.tensor([0.5, 1, 2, 3])


def _scattered(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0, 1] += 0.1
    return y


PROGRAMS["scatter"] = PROGRAMS["scatter"][0], _scattered


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PROGRAMS)
def test_jax_programs_that_request_lower_dtypes_equal_pytorchs_in_float64(name: str) -> None:
    program, reference = PROGRAMS[name]

    def loss(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: (fn(x).astype(jnp.float64) ** 2).sum()

    x = torch.tensor(X, requires_grad=True)
    with InFloat64():
        expected = reference(x)
        expected.square().sum().backward()
    lifted = in_float64(program)
    assert relative(lifted(X), expected.detach()) < 1e-15
    assert relative(jax.grad(loss(lifted))(X), x.grad) < 1e-15
    assert relative(jax.grad(loss(in_float64(jax.checkpoint(lifted))))(X), x.grad) < 1e-15
    if not name.startswith("custom"):  # custom rules are traced only when differentiated
        assert low_results(jax.make_jaxpr(program)(X).jaxpr), "the program requests no lower dtype"
    assert not low_results(jax.make_jaxpr(jax.grad(loss(lifted)))(X).jaxpr)


@pytest.mark.usefixtures("x64")
def test_a_constant_that_is_returned_is_in_float64_as_well() -> None:
    constant = in_float64(lambda x: lax.cond(x.sum() > 0, lambda: jnp.float32(0.1), lambda: jnp.float32(0.2)))(X)
    assert (constant.dtype, float(constant)) == (np.float64, 0.1)
    returned = in_float64(lambda _: jnp.float32(0.3))(X)
    assert (returned.dtype, float(returned)) == (np.float64, 0.3)


@pytest.mark.usefixtures("x64")
def test_dropout_masks_do_not_depend_on_the_dtype() -> None:
    key = jax.random.key(0)
    first = jax.random.uniform(key, (64, 64), jnp.float32)[0, 0].astype(jnp.float64)

    def masked(x: Any) -> Any:
        # In float32 the rate equals the first draw, which is then not below it; in float64 it would be.
        rate = (first * x[0, 0] + 1e-12).astype(jnp.float32)
        return jnp.where(jax.random.bernoulli(key, rate, x.shape), x.astype(jnp.float32) / rate, 0.0)

    x = np.ones((64, 64))
    plain, lifted = masked(jnp.asarray(x)), in_float64(masked)(x)
    assert plain[0, 0] == 0
    np.testing.assert_array_equal(plain == 0, lifted == 0)
    np.testing.assert_array_equal(np.unique(lifted), [0.0, 1 / (first + 1e-12)])


@pytest.mark.usefixtures("x64")
def test_float32_draws_do_not_change() -> None:
    key = jax.random.key(0)
    drawn = in_float64(lambda key: jax.random.uniform(key, (100,), jnp.float32))(key)
    assert drawn.dtype == np.float64
    np.testing.assert_array_equal(drawn, jax.random.uniform(key, (100,), jnp.float32))


def _mixed_integers(x: Any, ids: Any) -> Any:
    """A program that JAX rejects under x64, where `jnp.arange` is int64 and `jnp.zeros(3, jnp.float32)` is narrow."""
    rows = lax.select(ids > 1, ids, jnp.arange(len(ids)))
    window = lax.dynamic_slice(x[rows], (jnp.argmax(ids), ids[0]), (2, 2))
    count, picked = lax.scan(lambda n, i: (n + jnp.sum(jnp.arange(2)), x[n % 3]), ids[0], jnp.arange(3))
    total, _ = lax.scan(lambda h, row: (jnp.tanh(h + row), None), jnp.zeros(4, jnp.float32), x)
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return window.sum() / 3 + (picked**2).sum() * count + total.sum() + jnp.where(keep, x, 0.0).sum()


def _mixed_integers_in_torch(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    window = x[[0, 2, 2]][1:, :2]
    total = torch.zeros(4, dtype=torch.float64)
    for row in x:
        total = torch.tanh(total + row)
    return window.sum() / 3 + (x[[0, 1, 2]] ** 2).sum() * 3 + total.sum() + torch.where(keep, x, 0.0).sum()


def test_a_program_that_mixes_widths_under_x64_is_traced_in_32_bits() -> None:
    ids, x = np.array([0, 2, 1]), torch.tensor(X, requires_grad=True)
    keep = np.array(jax.random.bernoulli(jax.random.key(0), 0.5, X.shape))
    theirs = _mixed_integers_in_torch(x, torch.tensor(keep))
    theirs.backward()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for integer in (np.int32, np.int64):
            compute = jax.value_and_grad(in_float64(_mixed_integers))
            ours, gradient = compute(X, ids.astype(integer))
            assert relative(ours, theirs.detach()) < 1e-15
            assert relative(gradient, x.grad) < 1e-15
        with pytest.raises(TypeError, match="same dtypes"):
            in_float64(lambda x: lax.select(x > 0, x, jnp.arange(3)))(X[0, :3])


@jax.custom_vjp
def _opaque(x: Any) -> Any:
    return x.astype(jnp.float32)


_opaque.defvjp(lambda x: (_opaque(x.value), None), lambda _, g: (g,), symbolic_zeros=True)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: jnp.signbit(x.astype(jnp.float32)), "bitcast_convert_type of the JAX model cannot be computed"),
        (lambda x: jax.pure_callback(np.float32, jax.ShapeDtypeStruct((3, 4), np.float32), x), "pure_callback of the"),
        (_opaque, "custom_vjp_call of the JAX model cannot be computed in float64: its derivative is opaque"),
    ],
)
def test_operations_that_jax_cannot_widen_raise(program: Callable[..., Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        in_float64(program)(X)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("number", [0.1, -0.3, 1e-5, 0.7, 3.0, 0.0, math.inf, -math.inf])
def test_written_decimals_are_found(number: float, dtype: Any) -> None:
    assert written_number(float(np.asarray(number, dtype)), dtype) == number


@pytest.mark.parametrize("number", [768**-0.5, -1 / 3, math.sqrt(2), 2 * math.pi, math.log(2), 1 / math.log(2)])
def test_simple_expressions_are_found(number: float) -> None:
    assert written_number(float(np.float32(number))) == pytest.approx(number, rel=4e-16, abs=0)


def test_arbitrary_numbers_are_unchanged() -> None:
    numbers = np.random.default_rng(0).standard_normal(2000).astype(np.float32).astype(np.float64)
    kept = np.mean([written_number(x) == x for x in numbers])
    assert kept > 0.9
    assert all(np.float32(written_number(x)) == x for x in numbers)
    assert written_number(float(np.finfo(np.float32).min)) == np.finfo(np.float32).min


class RMSNorm(nnx.Module):
    """An RMSNorm as in JAX ports of Llama: it computes in float32 for any input dtype."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: Any) -> Any:
        x = x.astype(jnp.float32)
        return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.scale[...][None]


WIDTH = 6


def _rotated(x: Any) -> Any:
    angles = (
        jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] * 10000.0 ** (-jnp.arange(3, dtype=jnp.float32) / 3)[None]
    )
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


class Rotary(torch.nn.Module):
    """A norm, a rotary embedding and dropout in float32, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.frequencies = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        angles = torch.arange(len(x), dtype=torch.float32)[:, None] * self.frequencies.float()
        a, b = x.float().chunk(2, -1)
        x = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        return self.head(F.dropout(x, 0.25).to(dtype))


def hard_wired() -> Case:
    graphdef, norm = nnx.split(nnx.eval_shape(lambda: RMSNorm(WIDTH)), nnx.Param)
    wide = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
    bias = jax.ShapeDtypeStruct((WIDTH,), np.float32)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        x = _rotated(nnx.merge(graphdef, params["norm"])(batch["x"]))
        x = jnp.where(jax.random.bernoulli(rng, 0.75, x.shape), x / 0.75, 0.0)
        y = x.astype(batch["x"].dtype) @ params["kernel"] + params["bias"][None]
        return jaxtrain.Loss(jnp.sum(y.astype(jnp.float32) ** 2), weight=len(y)), {}

    return Case(
        name="hard-wired",
        torch_model=Rotary,
        torch_loss=lambda model, batch: (model(batch["x"]).float().square().sum(), len(batch["x"])),
        loss_fn=loss_fn,
        params_like={"norm": nnx.to_pure_dict(norm), "kernel": wide, "bias": bias},
        names=NameTable(
            {
                "norm/scale": TorchParam("scale"),
                "kernel": TorchParam("head.weight", LINEAR),
                "bias": TorchParam("head.bias"),
            }
        ),
        batch=lambda seed, rows: {"x": np.random.default_rng(seed).standard_normal((rows, WIDTH), np.float32)},
        rows=8,
        optimizer=AdamW(lr=1e-2),
        clip_norm=1.0,
    )


def test_a_case_that_hard_wires_float32_is_checked_in_float64() -> None:
    verdict = check(hard_wired(), steps=5)
    assert verdict.passed, verdict.faults
    assert max(verdict.loss_rel, verdict.grad_rel_max) < 1e-12
