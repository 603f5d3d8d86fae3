"""Where autocast rounds: what the backward pass keeps, and biases of linear layers."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxtrain.passes import recomputed
from jaxtrain.passes.numerics.autocast import autocast, kernel
from jaxtrain.program.equations import visit
from tests.passes.operands import F32, W, X, assert_same_bits, low, operands_of


def kept(fn, *args):
    """Return the dtypes and shapes of what the backward pass of a function keeps."""
    return sorted(
        (x.dtype.name, x.shape) for x in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *args))
    )


@pytest.mark.parametrize("fn", [kernel(jax.nn.gelu), recomputed(lambda x: jnp.exp(jnp.sin(x)))])
def test_an_elementwise_operation_keeps_its_low_precision_input_alone(fn):
    x, low_x = F32, F32.astype(jnp.bfloat16)
    assert {kind for kind, _ in kept(autocast(lambda x: fn(x @ F32), jnp.bfloat16), x)} == {"bfloat16"}
    assert kept(recomputed(fn), low_x) == [("bfloat16", (4, 4))]
    assert ("float32", (4, 4)) in kept(fn, x)


def test_a_recomputed_kernel_has_the_gradient_of_the_function_rounded_once():
    x = low(jnp.linspace(-3, 3, 16).reshape(4, 4))
    cast = autocast(lambda x: kernel(jax.nn.gelu)(x @ jnp.eye(4)), jnp.bfloat16)
    expected = jax.grad(lambda x: jax.nn.gelu(x).sum())(x)
    assert_same_bits(jax.grad(lambda x: cast(x).astype(np.float32).sum())(x), low(expected))
    with jax.enable_x64(True):
        jax.test_util.check_grads(cast, [np.linspace(-2.0, 2.0, 16).reshape(4, 4)], order=2)


LINEAR = {
    "nnx": lambda x, w, b: nnx_linear(x, w, b),
    "by hand": lambda x, w, b: x @ w + b[None],
    "the bias first": lambda x, w, b: b[None] + x @ w,
    "an example at a time": lambda x, w, b: jax.vmap(lambda row: w.T @ row + b)(x),
    "in a scan": lambda x, w, b: lax.map(lambda row: (row[None] @ w + b[None])[0], x),
}


def nnx_linear(x, w, b):
    layer = nnx.Linear(*w.shape, rngs=nnx.Rngs(0))
    layer.kernel, layer.bias = nnx.Param(w), nnx.Param(b)
    return layer(x)


@pytest.mark.parametrize("layer", LINEAR)
def test_a_linear_layer_is_rounded_once_and_so_is_the_gradient_of_its_bias(layer):
    random = np.random.default_rng(0)
    x, w, b = (random.normal(size=n).astype(np.float32) for n in ((64, 4), (4, 8), (8,)))
    cast = autocast(LINEAR[layer], jnp.bfloat16)
    out = cast(x, w, b)
    assert out.dtype == jnp.bfloat16
    product = jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=np.float32)
    assert_same_bits(out, (product + low(b)[None]).astype(jnp.bfloat16))
    cotangent = np.asarray(low(random.normal(size=(64, 8)).astype(np.float32)))
    gradient = jax.grad(lambda b: (cast(x, w, b).astype(np.float32) * cotangent).sum())(b)
    assert gradient.dtype == np.float32
    rounded = low(jnp.asarray(cotangent.sum(0)))
    if layer == "in a scan":  # each example's gradient is rounded before the sum
        np.testing.assert_allclose(gradient, rounded, rtol=2**-8)
    else:
        assert_same_bits(gradient, rounded)
    # The products of the backward pass are low-precision nevertheless.
    traced = jax.make_jaxpr(jax.grad(lambda x, w: cast(x, w, b).astype(np.float32).sum(), argnums=(0, 1)))(x, w)
    assert operands_of(traced, "dot_general") == [{"bfloat16"}] * 3


@pytest.mark.parametrize(("platform", "product"), [("cuda", "bf16"), ("cpu", "f32")])
def test_a_product_is_lowered_with_its_bias_in_the_form_that_the_platform_rounds_once(platform, product):
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((64, 4), (4, 8), (8,))]
    traced = jax.jit(autocast(nnx_linear, jnp.bfloat16)).trace(*shapes)
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    assert [line.rpartition("x")[2] for line in lines if "dot_general" in line] == [f"{product}>"]


NO_BIAS = {
    "a matrix": lambda x, w, b: x @ w + x[:, :1] * b[None],
    "a column": lambda x, w, b: x @ w + x[:, :1],
    "no product": lambda x, w, b: jnp.tanh(x @ w) + b[None],
    "of a batched product": lambda x, w, b: jnp.einsum("bij,bjk->bik", x[None], w[None]) + b[None, None],
}


@pytest.mark.parametrize("formula", NO_BIAS)
def test_other_additions_return_float32(formula):
    out = jax.eval_shape(autocast(NO_BIAS[formula], jnp.bfloat16), jnp.ones((5, 4)), jnp.ones((4, 8)), jnp.ones(8))
    assert out.dtype == np.float32


def test_a_low_precision_value_is_converted_once_so_that_its_gradient_is_rounded_once():
    def fn(x):
        wide = x @ W
        return (wide - wide.mean(-1, keepdims=True)) * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True))

    traced = jax.make_jaxpr(autocast(fn, jnp.bfloat16))(X)
    conversions = [e for e in visit(traced.jaxpr) if e.primitive.name == "convert_element_type"]
    # One for each operand of the product, and one for the product.
    assert len(conversions) == 3


def test_a_python_number_as_exponent_returns_float32_under_x64():
    with jax.enable_x64(True):
        out = autocast(lambda x, n: (x @ x) ** n, jnp.bfloat16)(F32, 2.5)
        assert out.dtype == np.float32


@pytest.mark.parametrize("uses", [1, 2])
def test_the_gradient_of_a_formula_that_one_product_uses_is_rounded_before_it_is_stored(uses):
    """PyTorch rounds the result for the product. Gradients of several uses are summed in float32, as PyTorch does."""

    def loss(formula, x, w):
        y = formula(x @ w).reshape(-1, 4)
        return sum((y @ w * i).sum() for i in range(1, 1 + uses))

    def formula(x):
        return x * jnp.exp(x)  # in float32

    x, w = jax.random.normal(jax.random.key(0), (2, 3, 4)), jax.random.normal(jax.random.key(1), (4, 4))
    marked, plain = (jax.grad(autocast(partial(loss, f), jnp.bfloat16), (0, 1)) for f in (recomputed(formula), formula))
    for ours, reference in zip(marked(x, w), plain(x, w), strict=True):
        np.testing.assert_array_equal(ours, reference)
    stored = [
        {v.aval.dtype.name for v in eqn.invars}
        for eqn in jax.make_jaxpr(marked)(x, w).eqns
        if eqn.primitive.name in ("remat2", "checkpoint") and eqn.params["differentiated"]
    ]
    assert stored == [{"bfloat16"} if uses == 1 else {"bfloat16", "float32"}]
