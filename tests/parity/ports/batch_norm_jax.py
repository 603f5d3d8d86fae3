"""The regression with flax.linen, and SGD by hand."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, name="first")(x)
        mean, var = x.mean(0), x.var(0)
        self.running("mean", mean, jnp.zeros)
        self.running("var", var * len(x) / (len(x) - 1), jnp.ones)
        scale, bias = (self.param(name, nn.initializers.ones, (5,)) for name in ("scale", "bias"))
        x = (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias
        return nn.Dense(2, name="second")(nn.relu(x))

    def running(self, name, now, start):
        average = self.variable("stats", name, start, (5,))
        average.value = 0.9 * average.value + 0.1 * now


net = Net()


def init(weights):
    params = {"scale": weights["1.weight"], "bias": weights["1.bias"]}
    for name, layer in (("first", 0), ("second", 3)):
        params[name] = {"kernel": weights[f"{layer}.weight"].T, "bias": weights[f"{layer}.bias"]}
    stats = {"mean": weights["1.running_mean"], "var": weights["1.running_var"]}
    return params, stats, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32)


def loss_fn(params, stats, batch):
    predicted, changed = net.apply({"params": params, "stats": stats}, batch["x"], mutable=["stats"])
    return ((predicted - batch["y"]) ** 2).mean(), changed["stats"]


@partial(jax.jit, donate_argnums=0)
def step(state, batch):
    params, stats, momentum, count = state
    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, batch)
    grads = jax.tree.map(lambda g, p: g + 1e-2 * p, grads, params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, g, m: p - 0.05 * (g + 0.9 * m), params, grads, momentum)
    return (params, stats, momentum, count + 1), loss


def weights(state):
    params, stats, *_ = state
    found = {"1.weight": params["scale"], "1.bias": params["bias"]}
    for name, layer in (("first", 0), ("second", 3)):
        found |= {f"{layer}.weight": params[name]["kernel"].T, f"{layer}.bias": params[name]["bias"]}
    return found | {"1.running_mean": stats["mean"], "1.running_var": stats["var"]}
