"""Masks of attention, its dropout, its precision under autocast, and the programs that call cuDNN."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jaxtrain.errors import UserError
from jaxtrain.models.attention import FORWARD, attention, primitives
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.primitives import fused_attention
from jaxtrain.passes import block, remat
from jaxtrain.passes.numerics.autocast import autocast
from jaxtrain.program.equations import visit

B, T, S, N, H = 2, 5, 7, 4, 8
RNG = np.random.default_rng(0)


def inputs(t=T, s=S, heads=N, dtype=np.float64):
    shapes = (B, t, N, H), (B, s, heads, H), (B, s, heads, H), (B, t, N, H)
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


@partial(jax.jit, static_argnums=0)
def pulled_back(fn, cotangent, *args):
    """Return fn(*args) and the gradients of its product with the cotangent."""
    out, vjp = jax.vjp(fn, *args)
    return out, *vjp(cotangent.astype(out.dtype))


def with_gradients(q, k, v, cotangent, **options):
    found = pulled_back(lambda q, k, v: attention(q, k, v, **options), cotangent, q, k, v)
    return [np.asarray(x) for x in found]


def torch_attention(q, k, v, cotangent, *, mask=None, causal=False, scale=None, bias=None):
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v, *(() if bias is None else (bias,)))]
    heads_first = [x.transpose(1, 2) for x in tensors[:3]]
    mask = None if mask is None else torch.tensor(mask)
    if bias is not None:
        mask = tensors[3] if mask is None else torch.where(mask, tensors[3], -np.inf)
    out = F.scaled_dot_product_attention(*heads_first, mask, is_causal=causal, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2)
    grads = torch.autograd.grad(out, tensors, torch.tensor(cotangent))
    return [x.detach().numpy() for x in (out, *grads)]


def padding():
    mask = np.ones((B, 1, 1, S), bool)
    mask[1, ..., 4:] = False
    return mask


def assert_same(ours, theirs, bound=1e-14):
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == y.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=0, atol=bound * np.abs(y).max())


def test_causal_and_a_mask_are_combined():
    # Together they mask every key of the first query.
    arrays, mask = inputs(), padding() & (np.arange(S) != 0)
    both = mask & np.tril(np.ones((T, S), bool))[None, None]
    with jax.enable_x64(True):
        assert_same(with_gradients(*arrays, mask=mask, causal=True), torch_attention(*arrays, mask=both))


def test_a_mask_of_padding_alone_is_computed_as_segments(monkeypatch):
    monkeypatch.setattr(primitives, "LONG", 1)
    segments = "q_segments", "k_segments"
    for mask, given in ((B, 1, 1, S), segments), ((B, 1, T, S), ("mask",)), ((B, N, 1, S), ("mask",)):
        traced = jax.make_jaxpr(partial(attention, mask=np.ones(mask, bool)))(*inputs()[:3])
        (eqn,) = [eqn for eqn in visit(traced.jaxpr) if eqn.primitive is FORWARD]
        assert eqn.params["given"] == given


@pytest.mark.parametrize("heads", [N, 2])
def test_a_fully_masked_row_is_zero_and_has_no_gradient(heads):
    arrays, mask = inputs(heads=heads), np.ones((B, 1, T, S), bool)
    mask[0, :, 3] = False
    with jax.enable_x64(True):
        ours = with_gradients(*arrays, mask=mask)
    assert_same(ours, torch_attention(*arrays, mask=mask))
    assert not ours[0][0, 3].any()
    assert not ours[1][0, 3].any()
    for dtype in (jnp.bfloat16, jnp.float16):
        cast = autocast(lambda q, k, v: attention(q, k, v, mask=mask), dtype)
        out, *grads = pulled_back(cast, arrays[3].astype(np.float32), *(np.float32(x) for x in arrays[:3]))
        assert not out[0, 3].any()
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in grads)


BIASES = {"by head": (1, N, T, S), "by row": (B, 1, T, S)}


def biased(q, k, v, bias, cotangent, **options):
    found = pulled_back(lambda *args: attention(*args[:3], bias=args[3], **options), cotangent, q, k, v, bias)
    return [np.asarray(x) for x in found]


def test_the_dropout_mask_is_determined_by_the_key():
    q, k, v, _ = inputs(dtype=np.float32)
    key = jax.random.key(0)
    v = np.broadcast_to(np.eye(S, H, dtype=np.float32)[None, :, None], v.shape)
    kept = attention(q, k, v, dropout=0.5, rng=key)[..., :S]
    whole = attention(q, k, v)[..., :S]
    mask = jax.random.bernoulli(key, 0.5, (B, N, T, S)).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(kept, np.where(mask, 2 * whole, 0), rtol=1e-6)
    np.testing.assert_array_equal(attention(q, k, v, dropout=0.5), attention(q, k, v))
    np.testing.assert_array_equal(attention(q, k, v, rng=key), attention(q, k, v))


def test_query_heads_not_divisible_by_key_heads_are_refused():
    q, k, v, _ = inputs(heads=3)
    with pytest.raises(UserError, match="4 query heads are not divisible by 3 key heads"):
        attention(q, k, v)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_under_autocast_products_are_in_low_precision_and_the_softmax_in_float32(dtype):
    arrays = inputs(heads=2, dtype=np.float32)
    cast = autocast(lambda q, k, v: attention(q, k, v, causal=True).astype(np.float32).sum(), dtype)
    found = list(visit(jax.make_jaxpr(jax.grad(cast, argnums=(0, 1, 2)))(*arrays[:3]).jaxpr))
    products = [eqn for eqn in found if eqn.primitive.name == "dot_general"]
    assert len(products) == 6
    assert all(v.aval.dtype == dtype for eqn in products for v in eqn.invars)
    assert all(v.aval.dtype == np.float32 for eqn in found if eqn.primitive.name == "exp" for v in eqn.invars)


FUSED = {"plain": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 2}, "mask": {"mask": padding()}}


def lowered(fn, *arrays, platform="cuda"):
    return jax.jit(fn).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def fused_calls(text):
    return sorted(re.findall(r"__cudnn\$fmha\w*", text))


def gradients(dtype=None, **options):
    def summed(q, k, v):
        return attention(q, k, v, **options).astype(np.float32).sum()

    return jax.grad(summed if dtype is None else autocast(summed, dtype), argnums=(0, 1, 2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_low_precision_a_program_for_cuda_calls_cudnn(dtype):
    arrays = inputs(6, 6, heads=2, dtype=np.float32)[:3]
    low = [x.astype(jnp.dtype(dtype)) for x in arrays]
    whole = np.ones((B, 1, 6, 6), bool)
    for name, bias in (("plain", ""), ("causal", ""), ("window", ""), ("mask", "ScaleBias")):
        options = FUSED[name] if name != "mask" else {"mask": whole}
        expected = [f"__cudnn$fmha{bias}Softmax", f"__cudnn$fmha{bias}SoftmaxBackward"]
        assert fused_calls(lowered(gradients(**options), *low)) == expected
        assert fused_calls(lowered(gradients(dtype, **options), *arrays)) == expected
        assert fused_calls(lowered(gradients(dtype, **options), *arrays, platform="cpu")) == []
    # Beside a mask the window is in the mask: cuDNN before 9.10.2 takes only one of them.
    for options, length in (({}, 2), ({"mask": whole}, 0)):
        text = lowered(partial(attention, causal=True, window=2, **options), *low)
        assert re.findall(r"sliding_window_length\\22: (\d+)", text) == [str(length)]


def test_remat_of_dots_keeps_the_output_of_the_kernel():
    q, k, v = inputs(6, 6, heads=2, dtype=np.float32)[:3]

    def layer(q, k, v):
        return attention(jnp.sin(q), k, v, causal=True)

    def calls(policy):
        cast = autocast(lambda *qkv: block(layer)(*qkv).astype(np.float32).sum(), jnp.bfloat16)
        traced = jax.make_jaxpr(jax.grad(remat(cast, policy), argnums=(0, 1, 2)))(q, k, v)
        names = [eqn.primitive.name for eqn in visit(traced.jaxpr)]
        return names.count("fused_attention"), names.count("fused_attention_backward")

    assert calls("none") == calls("dots") == (1, 1)
    assert calls("full") == (2, 1)
    # The kernel's forward rule hides no name that a policy may save.
    with pytest.raises(UserError, match="no checkpointed block uses a value named absent"):
        calls("names:absent")


def test_other_programs_compute_the_formula():
    arrays = [x.astype(jnp.bfloat16) for x in inputs(6, 6, heads=2)[:3]]
    narrow = [x[..., :4] for x in arrays]
    odd = [x[:, :5] for x in arrays]
    dropped = partial(gradients, dropout=0.1, rng=jax.random.key(0))
    texts = {
        "float32": lowered(gradients(), *(x.astype(np.float32) for x in arrays)),
        "narrow heads": lowered(gradients(), *narrow),
        "odd lengths and a mask": lowered(gradients(mask=np.ones((B, 1, 5, 5), bool)), *odd),
        "dropout": lowered(dropped(), *arrays),
        "ROCm": lowered(gradients(), *arrays, platform="rocm"),
    }
    assert {name for name, text in texts.items() if fused_calls(text)} == set()
    assert fused_calls(lowered(gradients(causal=True), *odd))


@pytest.mark.parametrize("case", ["mask", "window"])
def test_the_fused_primitives_differentiate_and_batch_like_the_formula(case):
    """Where there is no kernel the primitives compute the formula: what is around the kernel is checked in float64."""
    q, k, v, cotangent = inputs(heads=2)
    mask, options = FUSED[case].get("mask"), {**FUSED[case], "mask": None}

    settings = Options(H**-0.5, options.get("causal", False), options.get("window"))

    def fused(q, k, v, mask=None):
        return fused_attention(settings, q, k, v, Operands(mask))

    with jax.enable_x64(True):
        ours, vjp = jax.vjp(lambda q, k, v: fused(q, k, v, mask), q, k, v)
        assert_same([ours, *vjp(cotangent)], with_gradients(q, k, v, cotangent, **FUSED[case]))
        # Under vmap the keys of one sequence, with their mask, are shared.
        one = lambda q: fused(q[None], k[:1], v[:1], None if mask is None else mask[1:])[0]  # noqa: E731
        each = jnp.stack([one(x) for x in q])
        batched, vjp = jax.vjp(jax.vmap(one), q)
        assert_same([batched, *vjp(cotangent)], [each, *jax.vjp(lambda q: jnp.stack([*map(one, q)]), q)[1](cotangent)])


@pytest.mark.parametrize("shape", BIASES)
def test_the_fused_primitives_differentiate_and_batch_a_bias(shape):
    q, k, v, cotangent = inputs(heads=2)
    bias, mask = RNG.standard_normal(BIASES[shape]), padding()

    def fused(q, k, v, mask, bias):
        return fused_attention(Options(H**-0.5), q, k, v, Operands(mask, bias))

    with jax.enable_x64(True):
        for given in (None, mask):
            ours, vjp = jax.vjp(lambda q, k, v, bias, given=given: fused(q, k, v, given, bias), q, k, v, bias)
            assert_same([ours, *vjp(cotangent)], biased(q, k, v, bias, cotangent, mask=given))
        # Under vmap the sequences, each as a batch of two, share the bias.
        two = lambda q, bias: fused(jnp.stack([q, q]), k[:2], v[:2], None, bias)  # noqa: E731
        outs, vjp = jax.vjp(jax.vmap(two, in_axes=(0, None)), q, bias)
        each, looped = jax.vjp(lambda q, bias: jnp.stack([two(x, bias) for x in q]), q, bias)
        assert_same([outs, *vjp(2 * outs)], [each, *looped(2 * each)])


def test_a_window_is_that_of_its_mask_and_needs_causal():
    arrays = inputs(6, 6, heads=2)
    mask = np.tril(np.triu(np.ones((1, 1, 6, 6), bool), -2))
    with jax.enable_x64(True):
        assert_same(with_gradients(*arrays, causal=True, window=3), torch_attention(*arrays, mask=mask))
    with pytest.raises(UserError, match="window 3 needs causal=True"):
        attention(*arrays[:3], window=3)
