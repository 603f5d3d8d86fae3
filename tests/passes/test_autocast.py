"""Autocast: the dtype of every operation, and regions with other dtypes."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.passes.memory.remat import remat as rematerialize
from jaxtrain.passes.numerics.autocast import autocast, kernel
from jaxtrain.program import equations, rewrite
from jaxtrain.program.equations import visit
from tests.passes.operands import F32, MESH, ROWS, W, X, assert_same_bits, dtypes_of, low

IMAGE, KERNEL = jnp.ones((1, 6, 6, 2)), jnp.ones((3, 3, 2, 4))
MASK = np.tri(4, dtype=bool)


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


LOW, WIDE = "low", "float32"
# Every function takes `low`, the output of a matrix product, and `f32`, an input.
DTYPES = {
    "matmul": (lambda low, f32: f32 @ f32, LOW),
    "matmul of low": (lambda low, f32: low @ f32, LOW),
    "einsum": (lambda low, f32: jnp.einsum("ij,kj->ik", f32, f32), LOW),
    "batched": (lambda low, f32: jnp.einsum("bij,bjk->bik", f32[None], f32[None]), LOW),
    "matrix-vector": (lambda low, f32: f32 @ f32[0], LOW),
    "convolution": (lambda low, f32: convolve(IMAGE, KERNEL), LOW),
    "exp": (lambda low, f32: jnp.exp(low), WIDE),
    "log": (lambda low, f32: jnp.log(low), WIDE),
    "log1p": (lambda low, f32: jnp.log1p(low), WIDE),
    "expm1": (lambda low, f32: jnp.expm1(low), WIDE),
    "square": (lambda low, f32: low**2, WIDE),
    "power": (lambda low, f32: low**2.5, WIDE),
    "rsqrt": (lambda low, f32: lax.rsqrt(low), WIDE),
    "sum": (lambda low, f32: low.sum(), WIDE),
    "mean": (lambda low, f32: low.mean(axis=-1), WIDE),
    "product": (lambda low, f32: low.prod(), WIDE),
    "cumsum": (lambda low, f32: jnp.cumsum(low), WIDE),
    "variance": (lambda low, f32: low.var(axis=-1), WIDE),
    "norm": (lambda low, f32: jnp.linalg.norm(low), WIDE),
    "softmax": (lambda low, f32: jax.nn.softmax(low), WIDE),
    "log_softmax": (lambda low, f32: jax.nn.log_softmax(low), WIDE),
    "logsumexp": (lambda low, f32: jax.nn.logsumexp(low, axis=-1), WIDE),
    "cross_entropy": (lambda low, f32: cross_entropy(low, jnp.arange(4)), WIDE),
    "literal": (lambda low, f32: low * 2.0 + 1.0, LOW),
    "0-d scalar": (lambda low, f32: low * f32[0, 0], LOW),
    "negative": (lambda low, f32: -low, LOW),
    "tanh": (lambda low, f32: jnp.tanh(low), LOW),
    "sigmoid": (lambda low, f32: jax.nn.sigmoid(low), LOW),
    "sqrt": (lambda low, f32: jnp.sqrt(low), LOW),
    "relu": (lambda low, f32: jax.nn.relu(low), LOW),
    "relu6": (lambda low, f32: jax.nn.relu6(low), LOW),
    "silu": (lambda low, f32: jax.nn.silu(low), LOW),
    "maximum": (lambda low, f32: jnp.maximum(low, 0.0), LOW),
    "clip": (lambda low, f32: jnp.clip(low, -1.0, 1.0), LOW),
    "max": (lambda low, f32: low.max(axis=-1), LOW),
    "where with a literal": (lambda low, f32: jnp.where(MASK, low, 0.0), LOW),
    "where with zeros_like": (lambda low, f32: jnp.where(MASK, low, jnp.zeros_like(low)), LOW),
    "where with the least number": (lambda low, f32: jnp.where(MASK, low, jnp.finfo(low.dtype).min), LOW),
    "plus full_like": (lambda low, f32: low + jnp.full_like(low, 3.0), LOW),
    "pad": (lambda low, f32: jnp.pad(low, 1), LOW),
    "views": (lambda low, f32: low.T.reshape(2, 8)[:, ::2][None], LOW),
    "gather": (lambda low, f32: low[jnp.array([0, 2])], LOW),
    "take_along_axis": (lambda low, f32: jnp.take_along_axis(low, jnp.zeros((4, 1), int), axis=-1), LOW),
    "sort": (lambda low, f32: jnp.sort(low), LOW),
    "concatenate low": (lambda low, f32: jnp.concatenate([low, low]), LOW),
    "concatenate": (lambda low, f32: jnp.concatenate([low, f32]), WIDE),
    "add": (lambda low, f32: low + f32, WIDE),
    "multiply": (lambda low, f32: f32 * low, WIDE),
    "where": (lambda low, f32: jnp.where(MASK, low, f32), WIDE),
    "maximum of both": (lambda low, f32: jnp.maximum(low, f32), WIDE),
    "without low": (lambda low, f32: f32 * 2.0 + f32, WIDE),
    # Operations that XLA lacks in low precision run as written.
    "fft": (lambda low, f32: jnp.abs(jnp.fft.rfft(low)), WIDE),
    "cholesky": (lambda low, f32: jnp.linalg.cholesky(low), WIDE),
    "solve": (lambda low, f32: jnp.linalg.solve(low, f32), WIDE),
    "qr": (lambda low, f32: jnp.linalg.qr(low).Q, WIDE),
    "singular values": (lambda low, f32: jnp.linalg.svdvals(low), WIDE),
    "explicitly low": (lambda low, f32: f32.astype(jnp.bfloat16), "bfloat16"),
    "layer norm of low": (lambda low, f32: nnx.LayerNorm(4, rngs=nnx.Rngs(0))(low), WIDE),
    "dropout of low": (
        lambda low, f32: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, (4, 4)), low / 0.9, 0.0),
        LOW,
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("operation", DTYPES)
def test_every_operation_runs_in_its_listed_dtype(operation, dtype):
    fn, expected = DTYPES[operation]
    # Lowered, so that an operation that no backend supports fails.
    out = jax.jit(autocast(lambda x: fn(x @ x, x), dtype)).lower(F32).out_info
    assert out.dtype == (dtype if expected == LOW else expected)


def test_float16_and_bfloat16_are_promoted_to_float32():
    def fn(x):
        return x @ x, x.astype(jnp.bfloat16)

    # Traced with float32 and bfloat16 operands, which are float16 and bfloat16 under autocast.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.eval_shape(autocast(lambda x: jnp.concatenate(fn(x)), "float16"), F32)
        assert out.dtype == np.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_least_float32_is_the_least_number_of_a_lower_dtype(dtype):
    def filled(low, f32):
        return [jnp.where(MASK, x, number) for x in (low, f32) for number in (jnp.finfo(x.dtype).min, -jnp.inf)]

    found = autocast(lambda x: filled(x @ x, x), dtype)(F32)
    assert [x.dtype for x in found] == [dtype, dtype, np.float32, np.float32]
    expected = [float(jnp.finfo(x.dtype).min) for x in found]
    assert [float(x[0, 3]) for x in found] == [expected[0], -np.inf, expected[2], -np.inf]


def test_float64_is_unchanged():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), np.float64)
        fn = autocast(lambda x: jax.nn.softmax(jnp.tanh(x @ x) ** 2).sum(), jnp.bfloat16)
        traced = jax.make_jaxpr(fn)(x)
        assert not {v.aval.dtype.name for e in visit(traced.jaxpr) for v in e.outvars} & {"bfloat16", "float32"}
        assert_same_bits(fn(x), jax.nn.softmax(jnp.tanh(x @ x) ** 2).sum())


def test_integers_and_keys_are_unchanged():
    def fn(x, key):
        return (x @ x, x.sum(), jax.random.fold_in(key, 3), jax.random.bits(key))

    x, key = jnp.arange(16).reshape(4, 4), jax.random.key(0)
    ours, plain = autocast(fn, jnp.bfloat16)(x, key), fn(x, key)
    assert_same_bits(jax.random.key_data(ours[2]), jax.random.key_data(plain[2]))
    assert_same_bits((ours[0], ours[1], ours[3]), (plain[0], plain[1], plain[3]))


def test_outputs_are_arrays_in_the_structure_the_function_returns():
    out = autocast(lambda x: {"a": (x @ x, None), "b": [3.0, 2]}, jnp.bfloat16)(F32)
    assert jax.tree.structure(out) == jax.tree.structure({"a": (0, None), "b": [0, 0]})
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))


def test_autocast_disabled_regions_stay_in_float32():
    @jt.autocast_disabled()
    def head(x):
        return x @ W

    def fn(x):
        with jt.autocast_disabled():
            inside = lax.scan(lambda c, _: (c @ W, None), x, None, length=2)[0]
        return x @ W, inside, jax.jit(head)(x @ W), x @ W

    dtypes = [out.dtype.name for out in jax.eval_shape(autocast(fn, jnp.bfloat16), X)]
    assert dtypes == ["bfloat16", "float32", "float32", "bfloat16"]
    products = dtypes_of(jax.make_jaxpr(jax.grad(lambda x: autocast(head, jnp.bfloat16)(x).sum()))(X), "dot_general")
    assert products == [{"float32"}] * len(products)
    # Later transformations preserve it.
    cast = rematerialize(autocast(lambda x: jt.block(head)(x).sum(), "float16"), "full")
    assert dtypes_of(jax.make_jaxpr(jax.grad(cast))(X), "dot_general")[0] == {"float32"}


def test_an_inner_autocast_takes_precedence():
    inner = autocast(lambda x: x @ W, "float16")
    outs = jax.eval_shape(autocast(lambda x: (inner(x), x @ W), jnp.bfloat16), X)
    assert [out.dtype.name for out in outs] == ["float16", "bfloat16"]


def test_a_kernel_computes_in_float32_and_rounds_once():
    def cube(x):
        return x * x * x

    x = jnp.linspace(0.1, 3.0, 64).reshape(8, 8)
    ours = autocast(lambda x: kernel(cube)(x @ jnp.eye(8)), jnp.bfloat16)(x)
    assert_same_bits(ours, cube(low(x)).astype(jnp.bfloat16))
    assert not np.array_equal(ours, cube(x.astype(jnp.bfloat16)))
    assert_same_bits(kernel(cube)(x), cube(x))


def test_autocast_accepts_keyword_arguments():
    cast = autocast(lambda x, *, scale, w: scale * (x @ w), jnp.bfloat16)
    assert_same_bits(cast(X, w=W, scale=2.0), autocast(lambda x: 2.0 * (x @ W), jnp.bfloat16)(X))


def test_shardings_requested_inside_are_preserved():
    rows = jax.NamedSharding(MESH, ROWS)
    sharded = jax.jit(lambda x: x @ W, out_shardings=rows)
    out = jax.jit(autocast(sharded, jnp.bfloat16))(jnp.concatenate([X, X]))
    assert out.sharding.is_equivalent_to(rows, 2)


def test_equations_keep_their_source_line_and_name_scope():
    def fn(x):
        with jax.named_scope("attention"):
            return jnp.exp(x @ W)

    traced = jax.make_jaxpr(rewrite.transform(fn, lambda eqn, args, run: None))(X)
    for eqn in traced.eqns:
        assert equations.in_scope(eqn, "attention")
        assert any(frame.file_name == __file__ for frame in eqn.source_info.traceback.frames)


def test_an_unknown_device_is_refused():
    with pytest.raises(jt.UserError, match="device 'tpu' has no autocast lists: use one of cuda, cpu"):
        autocast(jnp.sin, jnp.bfloat16, device="tpu")
