"""Products in 8 bits and their gradients, beside torchao's linear layers and the float64 products of the operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtrain.passes import Fp8, policy
from jaxtrain.passes.fp8.fp8_product import fp8_product
from jaxtrain.program.equations import visit
from tests.passes import torchao_references as torchao

RECIPES = {"fp8": "tensorwise", "fp8_row": "rowwise"}


def operands(rows=(4, 20), sizes=(32, 48), seed=0):
    """Return rows, a kernel, a bias and a gradient, whose magnitudes are spread over five powers of ten."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 2, shape)

    x, gradient = jnp.asarray(normal(*rows, sizes[0]), jnp.bfloat16), jnp.asarray(normal(*rows, sizes[1]), jnp.bfloat16)
    return x, jnp.asarray(normal(*sizes), np.float32), jnp.asarray(normal(1, 1, sizes[1]), jnp.bfloat16), gradient


@jax.jit(static_argnames=("fp8",))
def with_gradients(x, kernel, bias, gradient, *, fp8):
    out, pull_back = jax.vjp(lambda *args: fp8_product(*args, fp8=fp8, result=jnp.bfloat16), x, kernel, bias)
    return out, *pull_back(gradient)


def assert_rounded_once(found, a, b, bias=0.0):
    """Check a bfloat16 product of float64 operands: half a unit in the last place, after sums in float32."""
    exact, total = a @ b + bias, np.abs(a) @ np.abs(b) + np.abs(bias)
    found = np.asarray(found, np.float64).reshape(exact.shape)
    assert (np.abs(found - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-20 * total).all()


def torchao_numbers(x, dtype, axis, power_of_two):
    data, scale = torchao.quantized(x, dtype, axis, power_of_two)
    return np.asarray(data.view(dtype), np.float64) / scale


@pytest.mark.parametrize("name", RECIPES)
def test_forward_and_gradients_are_products_of_the_operands_of_torchao(name):
    x, kernel, bias, gradient = operands()
    found = with_gradients(x, kernel, bias, gradient, fp8=policy(name).fp8)

    rows, gradients = (a.reshape(80, -1) for a in (x, gradient))
    is_row, of_gradient = name == "fp8_row", "float8_e4m3fn" if name == "fp8_row" else "float8_e5m2"

    def numbers(a, axis, dtype="float8_e4m3fn"):
        return torchao_numbers(a, dtype, axis if is_row else None, is_row)

    wide = np.asarray(bias, np.float64)[0]
    by_hand = {
        "product": (numbers(rows, -1), numbers(kernel, 0)),
        "of rows": (numbers(gradients, -1, of_gradient), numbers(kernel, -1).T),
        "of kernel": (numbers(rows, 0).T, numbers(gradients, 0, of_gradient)),
    }
    for (a, b), out, added in zip(by_hand.values(), found, (wide, 0, 0), strict=False):
        assert_rounded_once(out, a, b, added)
    np.testing.assert_array_equal(found[3][0, 0], gradients.astype(np.float32).sum(0).astype(jnp.bfloat16))
    assert [a.dtype.name for a in found] == ["bfloat16", "bfloat16", "float32", "bfloat16"]

    # torchao's own layer, without a bias, which it adds to the rounded product.
    linear = torch.nn.Linear(32, 48, bias=False)
    linear.weight = torch.nn.Parameter(torchao.to_torch(kernel.T))
    config = torchao.Float8LinearConfig.from_recipe_name(RECIPES[name])
    layer, leaf = torchao.Float8Linear.from_float(linear, config), torchao.to_torch(rows).requires_grad_()
    out = layer(leaf)
    out.backward(torchao.to_torch(gradients))
    theirs = out.detach().float(), leaf.grad.float(), layer.weight.grad.T
    ours = with_gradients(x, kernel, jnp.zeros_like(bias), gradient, fp8=policy(name).fp8)
    for (a, b), own, other in zip(by_hand.values(), ours, theirs, strict=False):
        assert_rounded_once(other, a, b)
        same = np.asarray(own, np.float32).reshape(other.shape) == other.numpy()
        assert same.mean() > 0.98  # sums in another order round to the other neighbor


def test_blocks_are_the_products_of_torchaos_blocks():
    x, kernel, bias, gradient = operands((2, 128), (256, 384))
    found = with_gradients(x, kernel, bias, gradient, fp8=Fp8("block"))
    rows, gradients = (torchao.to_torch(a.reshape(256, -1).astype(np.float32)) for a in (x, gradient))
    reference = torchao.blockwise()

    def numbers(kind, a):
        data, inverse = reference[f"torch_blockwise_scale_{kind}"](a)
        inverse = inverse.double()
        for axis in (0, 1):
            inverse = inverse.repeat_interleave(a.shape[axis] // inverse.shape[axis], axis)
        return (data.double() * inverse).numpy()

    weight = numbers("weight_quant", torchao.to_torch(kernel))
    assert_rounded_once(found[0], numbers("act_quant_lhs", rows), weight, np.asarray(bias, np.float64)[0])
    assert_rounded_once(found[1], numbers("act_quant_lhs", gradients), weight.T)
    assert_rounded_once(found[2], numbers("act_quant_rhs", rows).T, numbers("act_quant_rhs", gradients))


def test_sizes_that_are_not_multiples_of_a_block_are_those_filled_with_zeros():
    x, kernel, bias, gradient = operands((3, 50), (144, 208))
    found = with_gradients(x, kernel, bias, gradient, fp8=Fp8("block"))

    def filled(a, shape):
        return jnp.pad(a, [(0, to - n) for to, n in zip(shape, a.shape, strict=True)])

    wide = filled(x.reshape(150, 144), (256, 256)), filled(kernel, (256, 256)), filled(bias[0], (1, 256))
    of_wide = with_gradients(*wide, filled(gradient.reshape(150, 208), (256, 256)), fp8=Fp8("block"))
    cut = of_wide[0][:150, :208], of_wide[1][:150, :144], of_wide[2][:144, :208], of_wide[3][:, :208]
    for a, b in zip(found, cut, strict=True):
        a, b = (np.asarray(each, np.float32).reshape(b.shape) for each in (a, b))
        assert (a == b).mean() > 0.999  # sums in another order round to the other neighbor
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=2.0**-20 * np.abs(b).max())


@pytest.mark.parametrize("name", ["fp8", "fp8_row", "fp8_block"])
def test_zeros_give_zeros_and_an_inf_is_never_saturated_away(name):
    fp8 = policy(name).fp8
    x, kernel, bias, gradient = operands()
    zeros = with_gradients(x * 0, kernel * 0, bias * 0, gradient * 0, fp8=fp8)
    assert all((np.asarray(a, np.float32) == 0).all() for a in zeros)

    for bad in (np.inf, -np.inf, np.nan):
        _, of_x, of_kernel, of_bias = with_gradients(x, kernel, bias, gradient.at[1, 2, 3].set(bad), fp8=fp8)
        assert not np.isfinite(np.asarray(of_x[1, 2], np.float32)).any()
        assert not np.isfinite(of_kernel[:, 3]).any()
        assert not np.isfinite(of_bias[0, 0, 3])
        out, *_ = with_gradients(x.at[1, 2, 3].set(bad), kernel, bias, gradient, fp8=fp8)
        assert not np.isfinite(np.asarray(out[1, 2], np.float32)).any()
        out, *_ = with_gradients(x, kernel.at[3, 5].set(bad), bias, gradient, fp8=fp8)
        assert not np.isfinite(np.asarray(out[..., 5], np.float32)).any()


@pytest.mark.parametrize("name", ["fp8", "fp8_row", "fp8_block"])
def test_the_backward_pass_keeps_operands_in_8_bits(name):
    x, kernel, *_ = operands((4, 128), (128, 256))

    def out(x, kernel):
        return fp8_product(x, kernel, fp8=policy(name).fp8, result=jnp.bfloat16)

    _, pull_back = jax.vjp(out, x, kernel)
    kept = jax.tree.leaves(pull_back)
    assert {a.dtype.name for a in kept if a.size >= kernel.size} == {"float8_e4m3fn"}
    assert sum(a.nbytes for a in kept if a.dtype != np.float32) <= x.size + kernel.size + 8

    traced = jax.make_jaxpr(lambda g: pull_back(g))(jnp.ones((4, 128, 256), jnp.bfloat16))
    formats = [[v.aval.dtype.name for v in e.invars[:3:2]] for e in visit(traced.jaxpr) if "scaled" in str(e.primitive)]
    of_gradient = "float8_e5m2" if name == "fp8" else "float8_e4m3fn"
    assert sorted(map(sorted, formats)) == [sorted(["float8_e4m3fn", of_gradient])] * 2
