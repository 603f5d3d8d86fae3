"""The language model with flax.nnx, and Adam by hand."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(7, 4, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((5, 4)))
        self.qkv = nnx.Linear(4, 12, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions[...]
        q, k, v = jnp.split(self.qkv(x), 3, -1)
        scores = q @ k.mT / 2
        scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -jnp.inf)
        x = x + jax.nn.softmax(scores, axis=-1) @ v
        return x @ self.tokens.embedding[...].T


def init(weights):
    model = Model(nnx.Rngs(0))
    model.tokens.embedding[...] = jnp.asarray(weights["tokens.weight"])
    model.positions[...] = jnp.asarray(weights["positions"])
    model.qkv.kernel[...] = jnp.asarray(weights["qkv.weight"]).T
    graph, params = nnx.split(model)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return graph, params, zeros, zeros, jnp.zeros((), jnp.int32)


def loss_fn(params, graph, ids):
    logits = nnx.merge(graph, params)(ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


@jax.jit
def step(state, batch):
    graph, params, mu, nu, count = state
    loss, grads = jax.value_and_grad(loss_fn)(params, graph, batch["ids"])
    count = count + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + (1 - 0.9) * g, mu, grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + (1 - 0.999) * g**2, nu, grads)
    first, second = 1 - 0.9**count, 1 - 0.999**count
    params = jax.tree.map(lambda p, m, v: p - 3e-3 * (m / first) / (jnp.sqrt(v / second) + 1e-8), params, mu, nu)
    return (graph, params, mu, nu, count), loss


def weights(state):
    graph, params, *_ = state
    model = nnx.merge(graph, params)
    return {
        "tokens.weight": model.tokens.embedding[...],
        "positions": model.positions[...],
        "qkv.weight": model.qkv.kernel[...].T,
    }
