"""Meta-learning with MAML (Finn et al. 2017): learn weights from which one gradient step fits a new task.

    python examples/maml.py

Each row of a batch is a task, a sine wave. The inner step is a function that is differentiated like any other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt

INNER_LR = 0.05


def forward(params, x):
    hidden = jnp.tanh(x[:, None] * params["w1"][None] + params["b1"][None])
    return hidden @ params["w2"]


def error(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


def loss_fn(params, batch, rng):
    def adapted_loss(support_x, support_y, query_x, query_y):
        grads = jax.grad(error)(params, support_x, support_y)
        adapted = jax.tree.map(lambda p, g: p - INNER_LR * g, params, grads)
        return error(adapted, query_x, query_y)

    tasks = (batch[name] for name in ("support_x", "support_y", "query_x", "query_y"))
    losses = jax.vmap(adapted_loss)(*tasks)
    return jt.Loss(losses.sum(), weight=len(losses)), {}


def batches(steps, tasks=32, shots=10):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        amplitude, phase = rng.uniform(0.5, 2, (tasks, 1)), rng.uniform(0, np.pi, (tasks, 1))
        batch = {}
        for part in ("support", "query"):
            x = rng.uniform(-3, 3, (tasks, shots))
            batch |= {
                f"{part}_x": x.astype(np.float32),
                f"{part}_y": (amplitude * np.sin(x - phase)).astype(np.float32),
            }
        yield batch


rng = np.random.default_rng(1)
params = {"w1": rng.standard_normal(64), "b1": rng.standard_normal(64), "w2": rng.standard_normal(64) / 8}
step = jt.train_step(loss_fn, optax.adam(1e-2), accumulate=4, clip_norm=5.0)
state = step.init(params)
for i, batch in enumerate(batches(401)):
    state, metrics = step(state, batch)
    if i % 100 == 0:
        print(f"step {i:3}  loss after one inner step {metrics['loss']:.3f}")
