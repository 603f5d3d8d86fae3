"""Delayed scaling of fp8 products follows TransformerEngine's formulas, in windows, on meshes and across restarts."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jaxtrain as jt
from jaxtrain.transforms import Fp8

K = 3
WEIGHTS = (1.0, 1.0, 2.0)
LEARNING_RATE = 2.0**-16
FORMATS = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2
PATHS = "layers", "layers", "shared", "shared"
"""The kernel of each product, in order: two layers, and one that is used twice."""


def policy(**settings):
    return jt.Policy(np.float32, jnp.bfloat16, fp8=Fp8("delayed", **settings))


def loss_fn(params, batch, rng):
    h, _ = jax.lax.scan(lambda h, w: (h @ w, None), batch["x"], params["layers"])
    y = h @ params["shared"] @ params["shared"]
    return jt.Loss((y * batch["c"]).sum(), batch["weight"].sum()), {}


def parameters():
    def random(seed, *shape):
        return jnp.asarray(np.random.RandomState(seed).choice([1.0, 1.25, 1.5, 1.75], shape), jnp.float32)

    return {"layers": random(0, 2, 16, 16), "shared": random(1, 16, 16)}


def batches(updates):
    """Return windows of 3 micro-batches of 4 rows: without gradients, growing, and with a sudden overflow."""
    rng = np.random.RandomState(2)
    for i in range(updates):
        of_x, of_c = np.ones(K), np.full(K, 2.0**-10)
        if i < 2 or i == 9:
            of_c[:] = 0
        if 5 <= i < 9:
            of_x *= 2.0 ** (i - 4)
        if i == 12:
            of_x[1], of_c[2] = 2.0**12, 2.0**12
        x, c = (np.float32(rng.choice([1.0, 1.25, 1.5, 1.75], (K, 4, 16)) * f[:, None, None]) for f in (of_x, of_c))
        weight = np.repeat(np.float32(WEIGHTS)[:, None] / 4, 4, 1)
        yield {"x": x.reshape(-1, 16), "c": c.reshape(-1, 16), "weight": weight.reshape(-1)}


class Meta:
    """Scales and histories of a kernel, as `_amax_and_scale_update` of TransformerEngine updates them."""

    def __init__(self, fp8):
        self.fp8, self.scale = fp8, torch.ones(3)
        self.history = torch.zeros(fp8.history, 3)

    def update(self):
        amax = self.history.max(0).values if self.fp8.algorithm == "max" else self.history[0].clone()
        if len(self.history) > 1:
            self.history = torch.roll(self.history, -1, 0)
        self.history[0] = 0
        fp8_max = torch.tensor([torch.finfo(dtype).max for dtype in FORMATS])
        scale = (fp8_max / amax) / 2**self.fp8.margin
        scale = torch.where(amax > 0, scale, self.scale)
        self.scale = torch.where(torch.isfinite(amax), scale, self.scale)

    def quantize(self, i, x):
        """Record the largest magnitude, and return the numbers in 8 bits with their scale."""
        self.history[0, i] = torch.maximum(self.history[0, i], x.abs().max())
        largest = torch.finfo(FORMATS[i]).max
        return (x * self.scale[i]).clamp(-largest, largest).to(FORMATS[i]).double(), self.scale[i]


def product(a, b):
    """Multiply numbers in 8 bits, exactly, unscale in float32 and round to bfloat16."""
    (a, of_a), (b, of_b) = a, b
    terms = np.int64(a[:, :, None].numpy() * b[None].numpy() * 2.0**25)
    assert (np.abs(terms).sum(1) / np.maximum(np.gcd.reduce(terms, 1), 1)).max() < 2**24  # exact in float32
    return ((a @ b).float() * (1 / of_a) * (1 / of_b)).bfloat16().float()


class Reference:
    """The training loop in PyTorch."""

    def __init__(self, fp8):
        params = {name: torch.tensor(np.asarray(x)) for name, x in parameters().items()}
        self.kernels = [*params["layers"], params["shared"]]
        self.metas = [Meta(fp8) for _ in self.kernels]

    def step(self, batch):
        sums = [torch.zeros(16, 16) for _ in self.kernels]
        micro_batches = ({name: torch.tensor(x[i * 4 : i * 4 + 4]) for name, x in batch.items()} for i in range(K))
        for micro_batch in micro_batches:
            weight = micro_batch["weight"].sum()
            for i, gradient in self.backward(micro_batch, 1 / (weight * K)):
                sums[i] += gradient * (weight * K)
        for i, total in enumerate(sums):
            self.kernels[i] = self.kernels[i] - LEARNING_RATE * (total / sum(WEIGHTS))
            self.metas[i].update()

    def backward(self, batch, factor):
        h, saved = batch["x"], []
        for i in (0, 1, 2, 2):
            meta = self.metas[i]
            x, w = meta.quantize(0, h), meta.quantize(1, self.kernels[i])
            saved.append((i, x, w))
            h = product(x, w)
        gradient = (batch["c"] * factor).bfloat16().float()
        by_kernel = {}
        for i, (x, of_x), (w, of_w) in reversed(saved):
            dy = self.metas[i].quantize(2, gradient)
            by_kernel[i] = by_kernel.get(i, 0) + product((x.T, of_x), dy)
            gradient = product(dy, (w.T, of_w))
        return by_kernel.items()

    def check(self, state):
        scale, history = state.scales
        for i, (path, index) in enumerate((("layers", 0), ("layers", 1), ("shared", ()))):
            np.testing.assert_array_equal(scale[path][index], self.metas[i].scale)
            np.testing.assert_array_equal(history[path][index], self.metas[i].history.T)
            np.testing.assert_array_equal(state.params[path][index], self.kernels[i])


@pytest.mark.parametrize(
    "settings", [{"history": 5}, {"history": 3, "algorithm": "most_recent", "margin": 2}], ids=["max", "most_recent"]
)
def test_scales_histories_and_parameters_equal_the_formulas_of_transformer_engine_to_the_bit(settings):
    precision = policy(**settings)
    step = jt.train_step(loss_fn, optax.sgd(LEARNING_RATE), precision=precision, accumulate=K)
    state, reference = step.init(parameters()), Reference(precision.fp8)
    scales = []
    for batch in batches(24):
        state, _ = step(state, batch)
        reference.step(batch)
        reference.check(state)
        scales.append(np.asarray(state.scales.scale["layers"][0]))
    scales = np.array(scales)
    assert (scales[:2, 2] == 1).all()  # no gradients so far
    assert scales[12, 0] < 2**-8 * scales[11, 0]  # the overflow
    assert (scales[-1] == scales[-1]).all()
