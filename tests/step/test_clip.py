"""Clipping equals `torch.nn.utils.clip_grad_norm_` over the whole tree, and `clip_grad_value_`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxtrain.step.update.clip import clip_grad_norm, clip_grad_value

# Their squares and clipped values neither overflow nor underflow in float64.
MAGNITUDES = st.one_of(st.just(0.0), st.floats(1e-120, 1e120))
SIGNED = st.builds(lambda m, negative: -m if negative else m, MAGNITUDES, st.booleans())

clip = jax.jit(clip_grad_norm)


def torch_clip(grads, max_norm):
    parameters = []
    for g in grads.values():
        parameters.append(torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.tensor(g).dtype)))
        parameters[-1].grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return dict(zip(grads, (p.grad.numpy() for p in parameters), strict=True)), norm.numpy()


def check(grads, max_norm):
    expected, expected_norm = torch_clip(grads, max_norm)
    with jax.enable_x64(True):
        clipped, norm = clip(grads, np.float64(max_norm))
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-14)
    for name in grads:
        assert clipped[name].dtype == np.float64
        np.testing.assert_allclose(clipped[name], expected[name], rtol=1e-14, atol=0)


@settings(max_examples=200)
@given(
    arrays(np.float64, (2, 3), elements=SIGNED),
    arrays(np.float64, 4, elements=SIGNED),
    arrays(np.float64, (), elements=SIGNED),
    st.floats(1e-12, 1e12),
)
def test_clipping_equals_pytorch_in_float64(w, b, scalar, max_norm):
    check({"w": w, "b": b, "scalar": scalar}, max_norm)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-6, 1e-3, 1.0, 1e6])
def test_clipping_equals_pytorch_near_the_bound(max_norm, scale):
    check({"w": np.array([3.0, -4.0]) * scale, "b": np.zeros(2)}, max_norm)
    # At the bound itself PyTorch's 1e-6 matters: the gradient shrinks although its norm does not exceed the bound.
    check({"w": np.array([0.6, -0.8]) * max_norm, "b": np.zeros(2)}, max_norm)


def test_zero_gradients_stay_zero():
    clipped, norm = clip_grad_norm({"w": jnp.zeros(3)}, 1e-6)
    np.testing.assert_array_equal(clipped["w"], np.zeros(3))
    assert float(norm) == 0


def test_gradients_within_the_bound_are_bit_identical():
    grads = {"w": jnp.array([1e-20, -0.0, 0.1]), "b": jnp.array([0.3])}
    clipped, _ = clip_grad_norm(grads, 1.0)
    for name, g in grads.items():
        assert np.asarray(clipped[name]).tobytes() == np.asarray(g).tobytes()


def test_values_are_clipped_as_by_pytorch():
    values = np.float32([-np.inf, -3, -1, -0.5, -0.0, 0.5, 1, 3, np.inf, np.nan])
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    torch.nn.utils.clip_grad_value_([parameter], 1.0)
    np.testing.assert_array_equal(clip_grad_value({"w": values}, 1.0)["w"], parameter.grad)


def test_without_a_bound_only_the_norm_is_computed():
    grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
    clipped, norm = clip_grad_norm(grads, None)
    assert clipped is grads
    assert float(norm) == 5


def test_the_norm_is_that_of_the_whole_tree():
    clipped, norm = clip_grad_norm({"a": jnp.array([3.0]), "b": [jnp.array([[4.0]]), jnp.array(12.0)]}, 1.0)
    assert float(norm) == 13
    np.testing.assert_allclose(float(optax.tree.norm(clipped)), 1.0, rtol=1e-6)
