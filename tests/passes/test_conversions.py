"""Autocast adds no more conversions to a model than PyTorch's, and all products are low-precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config as HFConfig
from transformers import GPT2LMHeadModel

from jaxtrain.cost.flops import equation_flops
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, BatchNorm, GPT2Config, functional, functional_with_state
from jaxtrain.passes.numerics.autocast import KERNEL, autocast
from jaxtrain.program import equations

LAYERS, WIDTH, VOCABULARY, ROWS, TOKENS = 3, 32, 101, 2, 8
CHANNELS, STAGES, PIXELS, CLASSES = 8, 3, 12, 10


class TorchResidual(torch.nn.Module):
    """A basic block of ResNet (He et al. 2015, figure 2)."""

    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(CHANNELS) for _ in range(2))

    def forward(self, x):
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


class TorchResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(CHANNELS)
        self.blocks = torch.nn.Sequential(*(TorchResidual() for _ in range(STAGES)))
        self.head = torch.nn.Linear(CHANNELS, CLASSES)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.convs = nnx.List([conv(CHANNELS, rngs) for _ in range(2)])
        self.norms = nnx.List([BatchNorm(CHANNELS) for _ in range(2)])

    def __call__(self, x, training):
        y = jax.nn.relu(self.norms[0](self.convs[0](x), training))
        return jax.nn.relu(x + self.norms[1](self.convs[1](y), training))


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem, self.norm = conv(3, rngs), BatchNorm(CHANNELS)
        self.blocks = nnx.List([Residual(rngs) for _ in range(STAGES)])
        self.head = nnx.Linear(CHANNELS, CLASSES, rngs=rngs)

    def __call__(self, x, training):
        x = jax.nn.relu(self.norm(self.stem(x), training))
        for block in self.blocks:
            x = block(x, training)
        return self.head(x.mean((1, 2)))


def conv(channels, rngs):
    return nnx.Conv(channels, CHANNELS, (3, 3), padding=1, use_bias=False, rngs=rngs)


def torch_gpt2():
    config = HFConfig(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    return lambda: F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten(), reduction="sum")


def torch_resnet():
    model = TorchResNet()
    images, labels = torch.ones(ROWS, 3, PIXELS, PIXELS), torch.zeros(ROWS, dtype=int)
    return lambda: F.cross_entropy(model(images), labels, reduction="sum")


def jax_gpt2():
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=4)
    apply, params = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), np.int32)
    return lambda params, tokens: cross_entropy(apply(params, tokens, None), tokens).sum(), params, tokens


def jax_resnet():
    apply, params, state = functional_with_state(nnx.eval_shape(lambda: ResNet(nnx.Rngs(0))))
    images = jax.ShapeDtypeStruct((ROWS, PIXELS, PIXELS, 3), np.float32)

    def loss(params, images):
        logits, _ = apply(params, jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state), images, True)
        return cross_entropy(logits, jnp.zeros(ROWS, np.int32)).sum()

    return loss, params, images


MODELS = {"gpt2": (jax_gpt2, torch_gpt2), "resnet": (jax_resnet, torch_resnet)}


class Conversions(TorchDispatchMode):
    """Count conversions between floating-point dtypes of arrays larger than a scalar."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.numel() > 1:
            self.count += out.is_floating_point() and args[0].is_floating_point() and out.dtype != args[0].dtype
        return out


def in_pytorch(model, *, backward):
    with torch.random.fork_rng(devices=[]):
        loss = MODELS[model][1]()
    with torch.autocast("cpu", torch.bfloat16), Conversions() as counted:
        value = loss()
    if backward:
        with counted:
            value.backward()
    return counted.count


def in_jax(traced):
    """Count conversions as often as they run, without those whose result is unused."""
    total = 0
    for eqn, times in running(live(traced.jaxpr)):
        within_kernel = equations.in_scope(eqn, KERNEL)  # PyTorch does not show conversions within its kernels
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.size > 1 and not within_kernel:
            kinds = [v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0])]
            total += times * (kinds[0] != kinds[1] and all(jnp.issubdtype(kind, np.floating) for kind in kinds))
    return total


def live(traced):
    from jax.interpreters import partial_eval

    return partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))[0]


def running(traced, times=1):
    for eqn in traced.eqns:
        yield eqn, times
        for inner in equations.inner_jaxprs(eqn):
            yield from running(inner, times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1))


def traced(model, device, *, backward):
    loss, *shapes = MODELS[model][0]()
    cast = autocast(loss, jnp.bfloat16, device)
    return jax.make_jaxpr(jax.grad(cast) if backward else cast)(*shapes)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_autocast_adds_no_more_conversions_than_pytorch(model, backward):
    ours, theirs = in_jax(traced(model, "cpu", backward=backward)), in_pytorch(model, backward=backward)
    assert theirs / 2 < ours <= theirs


@pytest.mark.parametrize("model", MODELS)
def test_every_product_is_low_precision_in_both_passes(model):
    low, total = 0, 0
    for eqn, times in running(live(traced(model, "cuda", backward=True).jaxpr)):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            flops = times * equation_flops(eqn)
            total += flops
            low += flops * all(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)
    assert total > 1e5
    assert low / total >= 0.99
