"""One-line faults of ports, with the stage, the update and the tensors in which each shows, and the line at fault."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: `right` of a port is replaced by `wrong`.

    Attributes:
      port: Name of the port.
      right: A part of its text.
      wrong: What is there instead.
      stage: The stage that differs.
      tensor: The tensor in which it shows, or a tensor of several.
      update: The update in which it shows; None for the interface and for float32.
      line: A part of JAX's line in the verdict; empty where there is none.
    """

    port: str
    right: str
    wrong: str
    stage: str
    tensor: str | None
    update: int | None
    line: str = ""


PERCEPTRON, BATCH_NORM, ATTENTION = "perceptron", "batch_norm", "attention"

FAULTS = {
    "the epsilon of AdamW": Fault(PERCEPTRON, "eps=1e-8", "eps=1e-6", "numbers", "norm.weight", 1, "tx.update"),
    "weight decay coupled": Fault(
        PERCEPTRON,
        "tx = optax.adamw(schedule, eps=1e-8, weight_decay=0.1)",
        "tx = optax.chain(optax.add_decayed_weights(0.1), optax.adam(schedule))",
        "numbers",
        "norm.weight",
        1,
        "tx.update",
    ),
    "the epsilon of a layer norm": Fault(PERCEPTRON, "var + 1e-5", "var + 1e-6", "numbers", "loss", 1, "var + 1e-6"),
    "gelu by tanh": Fault(
        PERCEPTRON, "approximate=False", "approximate=True", "numbers", "loss", 1, "approximate=True"
    ),
    "a sum for a mean": Fault(PERCEPTRON, "labels).mean()", "labels).sum()", "numbers", "loss", 1),
    "a matrix that is not transposed": Fault(
        PERCEPTRON, 'weights[f"{name}.weight"]).T,', 'weights[f"{name}.weight"]),', "interface", "fc1.weight", None
    ),
    "the last row left out": Fault(
        PERCEPTRON,
        'batch["x"])\n',
        'batch["x"][:-1])\n    batch = {**batch, "y": batch["y"][:-1]}\n',
        "numbers",
        "loss",
        1,
    ),
    "no label smoothing": Fault(PERCEPTRON, ", 4), 0.1)", ", 4), 0.0)", "numbers", "loss", 1),
    "a schedule one update late": Fault(PERCEPTRON, "{5: 0.5", "{6: 0.5", "numbers", "norm.weight", 6, "tx.update"),
    "a schedule's second step left out": Fault(PERCEPTRON, ", 40: 0.5}", "}", "behaviour", "loss", None),
    "clipping without its epsilon": Fault(PERCEPTRON, "(norm + 1e-6)", "norm", "numbers", "norm.bias", 1, "/ norm"),
    "clipping of the update in place of the gradient": Fault(
        PERCEPTRON,
        'tx.update(clipped(grads), state["opt"], state["params"])',
        'tx.update(grads, state["opt"], state["params"])\n    updates = clipped(updates)',
        "numbers",
        "norm.weight",
        1,
    ),
    "a state changed in place": Fault(
        PERCEPTRON,
        'return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss',
        'state["params"] = optax.apply_updates(state["params"], updates)\n    return {**state, "opt": opt}, loss',
        "interface",
        "fc1.weight",
        None,
    ),
    "a loss that is written down": Fault(
        PERCEPTRON, '"opt": opt}, loss', '"opt": opt}, jnp.float32(1.5)', "numbers", "loss", 1
    ),
    "a gradient of the update before": Fault(
        PERCEPTRON,
        "    updates, opt = tx",
        "    grads, STALE['grads'] = STALE.get('grads', grads), grads\n    updates, opt = tx",
        "interface",
        None,
        None,
    ),
    "bfloat16 in a layer": Fault(
        PERCEPTRON,
        'x = x @ params["fc1"]["kernel"] +',
        'x = (x @ params["fc1"]["kernel"]).astype(jnp.bfloat16).astype(jnp.float32) +',
        "numbers",
        "losses",
        None,
        "astype(jnp.bfloat16)",
    ),
    "momentum that averages": Fault(
        BATCH_NORM, "0.9 * m + g, momentum", "0.9 * m + 0.1 * g, momentum", "numbers", "0.weight", 1, "0.1 * g"
    ),
    "momentum without Nesterov": Fault(BATCH_NORM, "(g + 0.9 * m)", "m", "numbers", "0.weight", 1, "0.05 * m"),
    "the momentum of a batch norm": Fault(
        BATCH_NORM, "0.9 * average.value + 0.1 * now", "0.1 * average.value + 0.9 * now", "numbers", "1.running_mean", 1
    ),
    "a biased running variance": Fault(
        BATCH_NORM, "var * len(x) / (len(x) - 1)", "var", "numbers", "1.running_var", 1, "average.value"
    ),
    "a running statistic that is not returned": Fault(
        BATCH_NORM, ', "1.running_var": stats["var"]', "", "interface", "1.running_var", None
    ),
    "tied weights untied": Fault(
        ATTENTION,
        "x @ self.tokens.embedding[...].T",
        "x @ jax.lax.stop_gradient(self.tokens.embedding[...]).T",
        "numbers",
        "tokens.weight",
        1,
        "stop_gradient",
    ),
    "a softmax over the queries": Fault(
        ATTENTION, "scores, axis=-1", "scores, axis=-2", "numbers", "loss", 1, "axis=-2"
    ),
    "scores that are not scaled": Fault(ATTENTION, "q @ k.mT / 2", "q @ k.mT", "numbers", "loss", 1, "q @ k.mT"),
    "no causal mask": Fault(ATTENTION, "jnp.where(jnp.tril(", "jnp.where(jnp.ones_like(", "numbers", "loss", 1),
    "a bias correction left out": Fault(
        ATTENTION, "(jnp.sqrt(v / second)", "(jnp.sqrt(v)", "numbers", "positions", 1, "jnp.sqrt(v)"
    ),
    "noise of its own": Fault(
        ATTENTION,
        "x = x + jax.nn.softmax",
        "x = x + 1e-6 * jax.random.normal(jax.random.key(0), x.shape) + jax.nn.softmax",
        "numbers",
        "loss",
        1,
    ),
}
