"""A GPT-2 with distinct sizes, so that the arrays of a compiled program can be identified by shape."""

import math

import jax
import numpy as np
import optax
from flax import nnx

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.distributed.mesh import parse_mesh
from jaxtrain.models import functional, gpt2

LAYERS, POSITIONS, ROWS, WIDTH, VOCABULARY = 3, 12, 8, 64, 32
TOKENS = {"tokens": np.zeros((2 * ROWS, POSITIONS), np.int32)}


def deep(spec, positions=POSITIONS, **options):
    """Return a step on a mesh with micro-batches of `ROWS` rows, and a function that creates its parameters."""
    config = gpt2.GPT2Config(vocab_size=VOCABULARY, n_positions=positions, n_embd=WIDTH, n_layer=LAYERS, n_head=4)
    model = lambda: gpt2.GPT2(config, rngs=nnx.Rngs(0))  # noqa: E731
    apply, _ = functional(nnx.eval_shape(model))

    def loss_fn(params, batch, rng):
        logits = apply(params, batch["tokens"], rng)
        return jt.Loss((jax.nn.logsumexp(logits, -1) - logits[..., 0]).sum(), logits.size), {}

    step = jt.train_step(loss_fn, optax.adam(1e-2), accumulate=2, **options)
    devices = jax.devices()[: math.prod(parse_mesh(spec).values())]
    return shard(step, make_mesh(spec, devices), gpt2.SHARDING), lambda: functional(model())[1]
