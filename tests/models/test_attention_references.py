"""Attention equals PyTorch's and the eager functions of `transformers` in float64, with gradients, on both paths."""

import functools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BloomConfig, MptConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.t5 import modeling_t5

from parity.oracle.in_torch import InFloat64
from tests.models.attention_programs import B, N, Program, drawn, evaluated

T = 24
SQUARE = Program(t=T, s=T, value_width=8)


def additive(given):
    """Return the mask as these functions take it, added to the scores."""
    return torch.where(torch.tensor(given.visible()), 0.0, torch.finfo(torch.float64).min)


def sdpa(given, q, k, v, bias=None, sinks=None):
    mask = None
    if given.mask is not None or given.segments is not None or given.window is not None:
        mask = torch.tensor(given.visible())
    if bias is not None:
        mask = torch.where(torch.tensor(given.visible()), bias, -torch.inf)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=given.causal and mask is None, scale=given.scale, enable_gqa=True
    )


def eager_of(module):
    def attend(given, q, k, v, bias=None, sinks=None):
        settings = types.SimpleNamespace(num_key_value_groups=N // k.shape[1], training=False, sinks=sinks)
        extra = {"softcap": given.softcap} if given.softcap else {} if bias is None else {"position_bias": bias}
        out = module.eager_attention_forward(settings, q, k, v, additive(given), scaling=given.scale, **extra)
        return out[0].transpose(1, 2)

    return attend


def bloom(given, q, k, v, bias, sinks=None):
    """Bloom's layer, of which the projections are given."""
    layer = BloomAttention(BloomConfig(hidden_size=N * 8, n_head=N), 0).double().eval()
    fused = torch.stack([q, k, v], 3).transpose(1, 2).flatten(2)
    layer.query_key_value.register_forward_hook(lambda *_: fused)
    layer.dense.register_forward_hook(lambda module, args, out: args[0])
    hidden = torch.zeros(B, T, N * 8, dtype=torch.float64)
    out = layer(hidden, hidden, bias.expand(B, N, 1, T).reshape(B * N, 1, T), additive(given))[0]
    return out.view(B, T, N, 8).transpose(1, 2)


def mpt(given, q, k, v, bias, sinks=None):
    """MPT's layer, of which the projections are given."""
    layer = MptAttention(MptConfig(d_model=N * 8, n_heads=N), 0).double().eval()
    layer.Wqkv.register_forward_hook(lambda *_: torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], 2))
    layer.out_proj.register_forward_hook(lambda module, args, out: args[0])
    hidden = torch.zeros(B, T, N * 8, dtype=torch.float64)
    out = layer(hidden, bias[0], attention_mask=torch.tensor(~given.visible()))[0]
    return out.view(B, T, N, 8).transpose(1, 2)


def bloom_alibi():
    return build_alibi_tensor(torch.ones(1, T), N, torch.float64).view(1, N, 1, T).numpy()


def mpt_alibi():
    return build_mpt_alibi_tensor(N, T)[None].double().numpy()


REFERENCES = {
    "sdpa": (sdpa, Program(scale=0.3, value_width=5)),
    "sdpa causal": (sdpa, Program(t=37, s=21, heads=1, causal=True)),
    "sdpa mask": (sdpa, Program(mask=(B, N, 21, 37), heads=4)),
    "sdpa padding": (sdpa, Program(mask=(B, 1, 1, 37))),
    "sdpa bias": (sdpa, Program(bias=(1, N, 21, 37), mask=(B, 1, 21, 37))),
    "sdpa segments": (sdpa, SQUARE._replace(segments=B, causal=True, window=7)),
    "llama": (eager_of(modeling_llama), SQUARE._replace(causal=True, mask=(B, 1, 1, T))),
    "mistral": (eager_of(modeling_mistral), SQUARE._replace(causal=True, window=7, segments=B)),
    "gemma2": (eager_of(modeling_gemma2), SQUARE._replace(causal=True, softcap=5.0, window=9)),
    "gpt-oss": (eager_of(modeling_gpt_oss), SQUARE._replace(causal=True, sinks=True, window=9)),
    "t5": (eager_of(modeling_t5), SQUARE._replace(t=21, heads=4, scale=1.0, bias=(1, N, 21, T), mask=(B, 1, 1, T))),
    "bloom": (bloom, SQUARE._replace(heads=4, causal=True, bias=(1, N, 1, T), segments=B)),
    "mpt": (mpt, SQUARE._replace(heads=4, causal=True, bias=(1, N, 1, T), segments=B)),
}
ALIBI = {"bloom": bloom_alibi, "mpt": mpt_alibi}


@functools.cache
def reference(name, seed):
    """Return the arrays, the cotangent, and the reference's output and gradients."""
    attend, program = REFERENCES[name]
    given, cotangent = drawn(program, seed)
    if name in ALIBI:
        given = given._replace(bias=ALIBI[name]())
    # These functions average the values for a query without keys.
    if given.mask is not None:
        given.mask[..., 0] = True
    if given.segments is not None:
        given = given._replace(segments=given.segments[:1] * 2)
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in given.trained.items()}
    with InFloat64():
        q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
        out = attend(given, q, k, v, **{name: x for name, x in tensors.items() if name not in "qkv"}).transpose(1, 2)
        grads = torch.autograd.grad(out, [*tensors.values()], torch.tensor(cotangent))
    assert out.dtype == torch.float64
    return given, cotangent, dict(zip(("out", *tensors), (x.detach().numpy() for x in (out, *grads)), strict=True))


@pytest.mark.parametrize("blocks", [(8, 16), None], ids=["blocks", "formula"])
@pytest.mark.parametrize("name", REFERENCES)
def test_values_and_gradients_equal_the_reference_in_float64(name, blocks):
    for seed in range(3):
        given, cotangent, theirs = reference(name, seed)
        ours = evaluated(REFERENCES[name][1]._replace(blocks=blocks), given, cotangent, seed)
        for what, y in theirs.items():
            np.testing.assert_allclose(ours[what], y, rtol=0, atol=1e-12 * np.abs(y).max(), err_msg=what)
