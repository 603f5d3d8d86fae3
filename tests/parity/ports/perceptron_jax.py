"""The perceptron as a pytree of arrays, with optax."""

import jax
import jax.numpy as jnp
import optax

schedule = optax.piecewise_constant_schedule(1e-2, {5: 0.5, 40: 0.5})
tx = optax.adamw(schedule, eps=1e-8, weight_decay=0.1)
DENSE = ("fc1", "fc2")
STALE = {}


def init(weights):
    params = {
        name: {"kernel": jnp.asarray(weights[f"{name}.weight"]).T, "bias": jnp.asarray(weights[f"{name}.bias"])}
        for name in DENSE
    }
    params["norm"] = {"scale": jnp.asarray(weights["norm.weight"]), "bias": jnp.asarray(weights["norm.bias"])}
    return {"params": params, "opt": tx.init(params)}


def forward(params, x):
    x = x @ params["fc1"]["kernel"] + params["fc1"]["bias"]
    x = jax.nn.gelu(x, approximate=False)
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    x = (x - mean) / jnp.sqrt(var + 1e-5)
    x = x * params["norm"]["scale"] + params["norm"]["bias"]
    return x @ params["fc2"]["kernel"] + params["fc2"]["bias"]


def loss_fn(params, batch):
    logits = forward(params, batch["x"])
    labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], 4), 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean()


def clipped(grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.3 / (norm + 1e-6)), grads)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = tx.update(clipped(grads), state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def gradients(state, batch):
    grads = clipped(jax.grad(loss_fn)(state["params"], batch))
    return weights({"params": grads})


def weights(state):
    params = state["params"]
    found = {f"{name}.weight": params[name]["kernel"].T for name in DENSE}
    found |= {f"{name}.bias": params[name]["bias"] for name in DENSE}
    return found | {"norm.weight": params["norm"]["scale"], "norm.bias": params["norm"]["bias"]}
