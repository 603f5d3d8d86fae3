"""Moments in 8 bits against bitsandbytes, whose quantizer and optimizers run on the CPU.

bitsandbytes' CPU kernel for float32 rounds to 65,536 equidistant numbers first and so misses the nearest code of small
elements; its other path, which it takes for other dtypes, finds the nearest code in float32, as its CUDA kernels.
"""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxtrain.errors import UserError
from jaxtrain.optim import SIGNED, UNSIGNED, adam8bit, adamw, adamw8bit, sgd, sgd8bit
from jaxtrain.optim.blockwise_quantization import Blockwise, dequantize, quantize

MAPS = {"signed": SIGNED, "unsigned": UNSIGNED}
STEPS = 20
SHAPES = {"kernel": (96, 80), "odd": (33, 127), "small": (5, 7)}


@cache
def bitsandbytes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes
        from bitsandbytes.backends.cpu import ops

        return bitsandbytes, ops


def nearest(x, code):
    """Return bitsandbytes' codes and magnitudes, by its path for the nearest code."""
    bitsandbytes()
    return torch.ops.bitsandbytes.quantize_blockwise(x.double(), code, 256)


def table(values):
    return bitsandbytes()[0].functional.create_dynamic_map(signed=values.signed)


def blocks(values):
    """Return blocks with every value of the type, every bound between two of them, and what is next to these."""
    rng = np.random.default_rng(0)
    code = values.values
    near = np.concatenate([code, (code[:-1] + code[1:]) / np.float32(2)])
    near = np.concatenate([near, *(np.nextafter(near, np.float32(to)) for to in (-2, 2))])
    edges = np.clip(np.concatenate([near, -near]), -1, 1).astype(np.float32)
    whole = np.concatenate([np.append(part, 1) for part in np.array_split(edges, 7)])
    spread = rng.standard_normal(10 * 256 + 100) * 10.0 ** rng.uniform(-12, 12, 10 * 256 + 100)
    zeros = np.zeros(256)
    subnormal = np.full(256, 1e-39)
    x = np.concatenate([np.pad(whole, (0, -whole.size % 256)), zeros, subnormal, spread]).astype(np.float32)
    return x if values.signed else np.abs(x)


@pytest.mark.parametrize("name", MAPS)
def test_codes_and_values_are_bitsandbytes_to_the_bit(name):
    values = MAPS[name]
    code = table(values)
    np.testing.assert_array_equal(values.values, code.numpy())
    x = blocks(values)
    theirs, absmax = nearest(torch.from_numpy(x), code)
    ours = jax.jit(lambda x: quantize(x, values))(x)
    # XLA:CPU flushes subnormal numbers to 0, here the magnitude of a block of them. Its inverse would be inf.
    flushed = np.where(absmax.numpy() < np.finfo(np.float32).tiny, 0, absmax.numpy())
    np.testing.assert_array_equal(ours.absmax, flushed)
    normal = np.repeat(flushed > 0, 256)[: x.size]
    np.testing.assert_array_equal(np.asarray(ours.codes)[normal], theirs.numpy()[normal])
    # bitsandbytes' codes of a block of zeros are 0 too.
    assert not np.asarray(ours.codes)[~normal].any()
    assert not theirs.numpy()[np.repeat(absmax.numpy() == 0, 256)[: x.size]].any()
    state = bitsandbytes()[0].functional.QuantState(absmax=absmax, code=code, blocksize=256, dtype=torch.float32)
    back = bitsandbytes()[0].functional.dequantize_blockwise(torch.from_numpy(np.array(ours.codes)), state)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda m: dequantize(m, values))(ours))[normal], back.numpy()[normal]
    )


@pytest.mark.parametrize("shape", [(3, 64, 96), (7, 11, 13), (5, 300), (4096,), (2, 512)])
def test_blocks_are_counted_through_the_array_or_in_the_order_of_its_axes(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for order in {tuple(range(x.ndim)), tuple(reversed(range(x.ndim)))}:
        ours = quantize(jnp.asarray(x), SIGNED, order)
        theirs, absmax = nearest(torch.from_numpy(x.transpose(order).copy()), table(SIGNED))
        np.testing.assert_array_equal(ours.absmax, absmax.numpy())
        np.testing.assert_array_equal(np.asarray(ours.codes).transpose(order), theirs.numpy())
        back = bitsandbytes()[0].functional.dequantize_blockwise(
            theirs, absmax=absmax, code=table(SIGNED), blocksize=256
        )
        np.testing.assert_array_equal(np.asarray(dequantize(ours, SIGNED, order)).transpose(order), back.numpy())


def start():
    rng = np.random.default_rng(2)
    return {k: (0.1 * rng.standard_normal(shape)).astype(np.float32) for k, shape in SHAPES.items()}


def gradients():
    """Return gradients [STEPS, …] of many magnitudes; one block of them is always zero."""
    rng = np.random.default_rng(3)

    def leaf(shape):
        g = rng.standard_normal((STEPS, *shape)) * 10.0 ** rng.uniform(-4, 0, shape)
        g.reshape(STEPS, -1)[:, 512:768] = 0
        return g.astype(np.float32)

    return {k: leaf(shape) for k, shape in SHAPES.items()}


def nearest_codes(patch):
    """Make bitsandbytes' optimizers on the CPU take the nearest codes, as they do on a GPU."""

    def quantize_nearest(x, code, absmax_out, out, blocksize):
        codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(x.double(), code, blocksize)
        # bitsandbytes' CUDA kernels do not let a negative first moment become 0; its CPU code does.
        codes[(x < 0) & (code[codes.int()] == 0)] -= 1
        out.copy_(codes)
        absmax_out.copy_(absmax)

    patch.setattr(bitsandbytes()[1], "_quant_blockwise_fp32_direct", quantize_nearest)


def torch_run(make, patch):
    """Return (parameters, states) after every update by bitsandbytes with the nearest codes."""
    nearest_codes(patch)
    params = {k: torch.nn.Parameter(torch.from_numpy(x.copy())) for k, x in start().items()}
    optimizer = make(list(params.values()))
    history = []
    for t in range(STEPS):
        for k, p in params.items():
            p.grad = torch.from_numpy(gradients()[k][t].copy())
        optimizer.step()
        history.append(
            {
                k: {"p": p.detach().numpy().copy()}
                | {n: v.numpy().copy() for n, v in optimizer.state[p].items() if hasattr(v, "numpy")}
                for k, p in params.items()
            }
        )
    return history


def jax_run(tx):
    def update(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (optax.apply_updates(params, updates), state)

    run = jax.jit(lambda p, g: jax.lax.scan(update, (p, tx.init(p)), g))
    _, history = run(start(), gradients())
    return jax.tree.map(np.asarray, history)


# Products by powers of two are exact, so that it is the same whether a compiler contracts them with a sum.
HALVES = {"lr": 2**-7, "betas": (0.5, 0.5)}
OPTIMIZERS = {
    "adamw": ("AdamW8bit", HALVES | {"weight_decay": 0.125}, adamw8bit(2**-7, 0.5, 0.5, weight_decay=0.125)),
    "adam": ("Adam8bit", HALVES, adam8bit(2**-7, 0.5, 0.5)),
    "sgd": ("SGD8bit", {"lr": 2**-7, "momentum": 0.5, "weight_decay": 0.125}, sgd8bit(2**-7, 0.5, weight_decay=0.125)),
    "adamw at its defaults": ("AdamW8bit", {}, adamw8bit()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_updates_equal_bitsandbytes(name, monkeypatch):
    kind, options, tx = OPTIMIZERS[name]
    make = getattr(bitsandbytes()[0].optim, kind)
    theirs = torch_run(lambda params: make(params, **options), monkeypatch)
    params, states = jax_run(tx)
    fields = {"momentum_buffer": 1} if name == "sgd" else {"mu": 1, "nu": 2}
    for t in range(STEPS):
        for k in SHAPES:
            same = np.ones(SHAPES[k], bool)
            for field, i in fields.items():
                moment, state = optax.tree.get(states, field)[k], theirs[t][k]
                if not isinstance(moment, Blockwise):
                    assert k == "small"
                    continue
                np.testing.assert_allclose(moment.absmax[t], state[f"absmax{i}"], rtol=1e-6)
                difference = moment.codes[t].astype(int) - state[f"state{i}"]
                same &= difference == 0
                assert np.abs(difference).max() <= 1
            # Another last digit of a moment is another code only next to the bound between two codes.
            assert same.all() if options else same.mean() > 0.999
            # The bias corrections are float32 here and double in PyTorch: each update is rounded in another place.
            bound = 4 * (t + 1) * np.finfo(np.float32).eps * np.abs(theirs[t][k]["p"]).max()
            assert (np.abs(params[k][t] - theirs[t][k]["p"])[same] <= bound).all()


def test_updates_equal_float32_optimizers_to_the_bit_where_moments_are_representable():
    rng = np.random.default_rng(4)
    # Every element is 0 or the largest magnitude of its block, and stays so; few digits, so that products are exact.
    of_blocks = np.repeat(rng.integers(1, 16, (8, 40)), 256, 1) * rng.integers(0, 2, 40 * 256)
    grads = jnp.asarray(of_blocks.reshape(8, 64, 160), np.float32)
    for eight, whole in [
        (adamw8bit(0.125, 0.5, 0.5), adamw(0.125, 0.5, 0.5)),
        (sgd8bit(0.125, 0.5), sgd(0.125, 0.5)),
    ]:

        def run(tx, grads):
            def update(carry, g):
                updates, state = tx.update(g, carry[1], carry[0])
                return (carry[0], state), updates

            p = jnp.ones(grads.shape[1:])
            return jax.lax.scan(update, (p, tx.init(p)), grads)[1]

        a, b = jax.jit(lambda g, eight=eight, whole=whole: (run(eight, g), run(whole, g)))(grads)
        np.testing.assert_array_equal(a, b)


def test_what_stays_in_float32():
    params = {"wte": jnp.ones((64, 64)), "head": jnp.ones((64, 64), jnp.bfloat16), "bias": jnp.ones(64)}
    tx = adamw8bit(1e-3, float32=("wt*",), block_order={"head": (1, 0)})
    state = tx.init(params)
    mu = optax.tree.get(state, "mu")
    assert [mu[k].dtype for k in ("wte", "bias")] == [np.float32] * 2
    assert isinstance(mu["head"], Blockwise)
    assert mu["head"].codes.shape == (64, 64)
    updates, new = tx.update(params, state, params)
    assert updates["head"].dtype == jnp.bfloat16
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), new)
    small = optax.tree.get(adamw8bit(1e-3, min_8bit_size=10).init(params), "mu")["bias"]
    assert isinstance(small, Blockwise)
    for wrong, message in [
        ({"float32": "wte"}, "list of patterns"),
        ({"block_order": {"bias": (1, 0)}}, "block_order"),
        ({"min_8bit_size": -1}, "min_8bit_size must be at least 0, got -1: use 4096"),
    ]:
        with pytest.raises(UserError, match=message):
            adamw8bit(1e-3, **wrong).init(params)
