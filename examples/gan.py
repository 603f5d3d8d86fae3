"""Train a GAN (Goodfellow et al. 2014) on a ring of eight Gaussians: two losses and two optimizers in one state.

    jaxtrain train examples/gan.py::Ring

The loss is the sum of the losses of both networks. `stop_gradient` excludes the parameters of the other network, so
that the gradient is the same as that of two separate losses. Even steps update the discriminator and odd steps the
generator.

Less than a minute on two CPU cores: the samples cover all eight Gaussians, and about 80% of them are within three
standard deviations of one.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt

MODES = 8
STD = 0.1
"""Standard deviation of each Gaussian."""


@dataclass(frozen=True, kw_only=True)
class Ring(jt.Recipe):
    """A generative adversarial network on a ring of Gaussians."""

    width: int = 128
    """Units of each hidden layer."""
    latent: int = 2
    """Dimensions of the generator's noise."""
    steps: int = 6000
    batch_size: int = 128
    lr: float = 1e-3
    clip_norm: float | None = None  # both networks would be clipped by their common norm
    log_every: int = 100
    eval_every: int = 1000
    save_every: int = 1000

    def task(self):
        def init():
            keys = jax.random.split(jax.random.key(self.seed))
            return {
                "generator": layers(keys[0], [self.latent, self.width, self.width, 2]),
                "discriminator": layers(keys[1], [2, self.width, self.width, 1]),
            }

        def generate(params, key, count):
            return network(params, jax.random.normal(key, (count, self.latent)))

        def loss_fn(params, batch, rng):
            real, discriminator = batch["point"], params["discriminator"]
            fake = generate(params["generator"], jax.random.key(0) if rng is None else rng, len(real))
            is_real = network(discriminator, real)
            is_fake = -network(discriminator, jax.lax.stop_gradient(fake))
            fools = network(jax.lax.stop_gradient(discriminator), fake)
            classification = jax.nn.softplus(-is_real) + jax.nn.softplus(-is_fake)
            losses = {"discriminator": classification, "generator": jax.nn.softplus(-fools)}
            return jt.Loss.of(sum(losses.values())), {name: jt.Loss.of(loss) for name, loss in losses.items()}

        def evaluate(state, batches):
            samples = np.asarray(generate(state.params["generator"], jax.random.key(1), 2000))
            distances = np.linalg.norm(samples[:, None] - centers(), axis=-1)
            near = distances.min(axis=1) < 3 * STD
            counts = np.bincount(distances.argmin(axis=1)[near], minlength=MODES)
            return {"modes": int((counts > 20).sum()), "near": float(near.mean())}

        return jt.Task(
            init=init,
            loss_fn=loss_fn,
            train=ring(10_000, self.seed),
            evaluate=evaluate,
            best_metric="near",
            is_highest_best=True,
        )

    def make_optimizer(self):
        def adam(turn):
            return optax.transforms.conditionally_mask(optax.adam(self.lr, b1=0.5), lambda step: step % 2 == turn)

        turns = {"discriminator": adam(0), "generator": adam(1)}
        return optax.multi_transform(turns, {name: name for name in turns})


def layers(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    kernels = [jax.random.normal(k, (n, m)) * (2 / n) ** 0.5 for k, n, m in zip(keys, sizes, sizes[1:], strict=False)]
    return [{"kernel": kernel, "bias": jnp.zeros(kernel.shape[1])} for kernel in kernels]


def network(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.leaky_relu(x @ layer["kernel"] + layer["bias"], 0.2)
    return x @ last["kernel"] + last["bias"]


def centers():
    angle = 2 * np.pi * np.arange(MODES) / MODES
    return 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def ring(count, seed):
    rng = np.random.default_rng(seed)
    points = centers()[rng.integers(MODES, size=count)] + rng.normal(0, STD, (count, 2))
    return {"point": points.astype(np.float32)}
