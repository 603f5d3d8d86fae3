"""A GPT-2 for the tests, with the loss of its next tokens."""

import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional

SMALL = GPT2Config(vocab_size=512, n_positions=128, n_embd=128, n_layer=2, n_head=2)


def language_model(config=SMALL):
    """Return (a function that creates the params, loss_fn)."""
    apply, _ = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))

    def loss_fn(params, batch, rng):
        logits = apply(params, batch["tokens"][:, :-1])
        return jt.Loss.of(cross_entropy(logits, batch["tokens"][:, 1:])), {}

    return lambda: functional(GPT2(config, rngs=nnx.Rngs(0)))[1], loss_fn


def tokens(rows, config=SMALL, seed=0):
    """Return a batch of random tokens."""
    shape = rows, config.n_positions + 1
    return {"tokens": np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)}
