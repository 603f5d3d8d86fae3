"""Train a Wasserstein critic with gradient penalty (Gulrajani et al. 2017), a gradient inside the loss.

    python examples/gradient_penalty.py

`jax.grad` inside the loss function corresponds to PyTorch's `torch.autograd.grad(…, create_graph=True)`.
"""

import jax
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.losses import subgradients

PENALTY = 10.0


def critic(params, x):
    """Return the score of a point [2]."""
    hidden = jax.nn.softplus(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"]


def loss_fn(params, batch, rng):
    def loss(real, fake, mix):
        slope = jax.grad(critic, argnums=1)(params, mix * real + (1 - mix) * fake)
        penalty = PENALTY * (subgradients.norm(slope) - 1) ** 2
        return critic(params, fake) - critic(params, real) + penalty

    losses = jax.vmap(loss)(batch["real"], batch["fake"], batch["mix"])
    return jt.Loss(losses.sum(), weight=len(losses)), {}


def batches(steps, rows=256):
    """Yield batches with real points on a circle and fake points around its center."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        angle = rng.uniform(0, 2 * np.pi, rows)
        yield {
            "real": 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32),
            "fake": rng.standard_normal((rows, 2), np.float32),
            "mix": rng.random(rows, np.float32),
        }


rng = np.random.default_rng(1)
params = {"w1": rng.standard_normal((2, 64)) / 2, "b1": np.zeros(64), "w2": rng.standard_normal(64) / 8}
step = jt.train_step(loss_fn, optax.adam(3e-3), accumulate=4)
state = step.init(params)
for i, batch in enumerate(batches(201)):
    state, metrics = step(state, batch)
    if i % 50 == 0:
        print(f"step {i:3}  loss {metrics['loss']:.3f}")
