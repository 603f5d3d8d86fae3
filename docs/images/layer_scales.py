"""Train a model whose layers' gradients are 2¹² apart, and draw docs/images/layer_scales.svg:
`python -m docs.images.layer_scales`.

In float16 no single loss scale suits all layers of the model: at the largest one with which no gradient overflows, the
gradients of the first layers are zero.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt

HERE = Path(__file__).parent
WIDTH, LAYERS, ROWS, APART = 32, 5, 64, 2.0**-12
SINGLE, ADAPTIVE, RULE, TRUTH, INK = "#c2410c", "#1d4ed8", "#15803d", "#18181b", "#52525b"


class Run(NamedTuple):
    """A training run.

    Attributes:
      losses: Loss of every update.
      zeros: Share of the gradients' elements that are zero, in every update.
      skipped: Whether each update was skipped.
      scales: Loss scales of the layers in every update, or the one of all.
    """

    losses: np.ndarray
    zeros: np.ndarray
    skipped: np.ndarray
    scales: np.ndarray


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    """Return the squared error of a chain of layers, each of which passes on 2⁻¹² of its gradient."""
    del rng

    @jt.block
    def layer(kernel: jax.Array, x: jax.Array) -> jax.Array:
        x = jt.hook(x.astype(np.float32), lambda gradient: APART * gradient)
        return jnp.tanh(x @ kernel).astype(np.float32)

    x, _ = jax.lax.scan(lambda x, kernel: (layer(kernel, x), None), batch["x"], params["layers"])
    return jt.Loss(jnp.square((x @ params["head"]).astype(np.float32) - batch["y"]).sum(), weight=1), {}


def parameters(seed: int) -> Any:
    """Return initial parameters: normal, and such that activations keep their magnitude."""
    normal = np.random.default_rng(seed).standard_normal((LAYERS + 1, WIDTH, WIDTH)).astype(np.float32)
    return {"layers": 1.5 / WIDTH**0.5 * normal[:LAYERS], "head": normal[LAYERS] / WIDTH**0.5}


def batches(updates: int) -> Any:
    """Return the batches of a run, labeled by a model of other parameters."""
    teacher = parameters(seed=1)
    x = np.random.default_rng(2).standard_normal((updates, ROWS, WIDTH)).astype(np.float32)
    y = x
    for kernel in teacher["layers"]:
        y = np.tanh(y @ kernel)
    return {"x": x, "y": y @ teacher["head"]}


def _recorded() -> optax.GradientTransformation:
    """Keep the gradient in the optimizer's state."""
    return optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, grads))


def train(precision: str, updates: int, loss_scale: Any = None) -> Run:
    """Train the model from the same parameters on the same batches."""
    optimizer = optax.chain(_recorded(), optax.adam(2e-3, eps=1e-20))
    step = jt.train_step(loss_fn, optimizer, precision=precision, loss_scale=loss_scale)
    state, found, data = step.init(parameters(seed=0)), [], batches(updates)
    for x, y in zip(data["x"], data["y"], strict=True):
        state, metrics = step(state, {"x": x, "y": y})
        gradient = np.asarray(state.opt_state[0]["layers"])
        scales = metrics.get("loss_scales", jnp.full(LAYERS, metrics["loss_scale"]))
        found.append((metrics["loss"], (gradient == 0).mean(), metrics["skipped"], scales))
    return Run(*map(np.stack, zip(*jax.device_get(found), strict=True)))


def runs(updates: int) -> dict[str, Run]:
    """Train in float32, and in float16 with a single scale, with scales by layer, and with adaptive ones."""
    return {
        "float32": train("fp32", updates),
        "one scale": train("fp16", updates, jt.dynamic_loss_scale(growth_interval=10)),
        "by layer": train("fp16", updates, jt.per_layer_loss_scale(LAYERS, growth_interval=10)),
        "by layer, adaptive": train(
            "fp16", updates, jt.per_layer_loss_scale(LAYERS, underflow=1e-6, growth_interval=10)
        ),
    }


def draw(found: dict[str, Run]) -> None:
    """Draw the losses, and the scales of the layers."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "layer_scales", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}
    figure, (left, right) = plt.subplots(ncols=2, figsize=(8.0, 3.4), layout="constrained")
    colors = dict(zip(found, (TRUTH, SINGLE, RULE, ADAPTIVE), strict=True))
    for name, run in found.items():
        is_truth = name == "float32"
        line = "--" if name == "by layer" else "-"
        width, alpha = (3.5, 0.25) if is_truth else (1.2, 1.0)
        left.plot(_smooth(run.losses), color=colors[name], label=name, linestyle=line, linewidth=width, alpha=alpha)
    left.set(xlabel="update", ylabel="loss", title="Training loss, mean of 10 updates")
    left.legend(frameon=False)
    for name in ("one scale", "by layer", "by layer, adaptive"):
        for layer in range(LAYERS if name != "one scale" else 1):
            scale = np.log2(found[name].scales[:, layer])
            right.plot(scale, color=colors[name], linewidth=1.2, linestyle="--" if name == "by layer" else "-")
            if name == "by layer, adaptive":
                at = (len(scale) - 1, scale[-1])
                right.annotate(f"layer {layer}", at, (0, 3), textcoords="offset points", color=INK, ha="right")
    right.set(xlabel="update", ylabel="log₂ of the scale", title="Loss scales")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(INK)
        axes.tick_params(colors=INK)
    figure.savefig(HERE / "layer_scales.svg", metadata={"Date": None}, facecolor="white")


def _smooth(losses: np.ndarray, over: int = 10) -> np.ndarray:
    return np.convolve(losses, np.full(over, 1 / over), mode="valid")


def table(found: dict[str, Run]) -> str:
    """Return what each run lost, and its last loss, as rows of a Markdown table."""
    rows = (
        f"| {name} | {run.zeros.mean():.2%} | {run.zeros[-20:].mean():.2%} | {run.skipped.sum()} "
        f"| {run.losses[-20:].mean():.1f} |"
        for name, run in found.items()
    )
    return "\n".join(rows)


if __name__ == "__main__":
    measured = runs(updates=400)
    print(table(measured))
    draw(measured)
