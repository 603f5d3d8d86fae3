"""Train a model whose layers' gradients are 2¹² apart, and draw docs/images/layer_scales.svg:
`python -m docs.images.layer_scales`.

In float16 no single loss scale suits all layers of the model: at the largest one with which no gradient overflows, the
gradients of the first layers are zero. What float16 rounds, apart from its range, is shown by a run in which the same
numbers are rounded to its 11 bits with the exponents of float32.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.pages import Chart, Panel, between, curve, linear, svg, whole

HERE = Path(__file__).parent
WIDTH, LAYERS, ROWS, APART = 32, 5, 64, 2.0**-12
BLOCKS = LAYERS + 1  # and the head
ADAPTIVE_RUN = "float16, by layer, adaptive"
COLORS = {"float32": "c7 broad", "float16, one scale": "c1", "float16, by layer": "c2 dashed", ADAPTIVE_RUN: "c0"}


class Run(NamedTuple):
    """A training run.

    Attributes:
      losses: Loss of every update.
      lost: Share of the gradients' elements that are zero, though not in float32, in every update that was applied.
      skipped: Whether each update was skipped.
      scales: Loss scales of the layers in every update, or the one of all.
    """

    losses: np.ndarray
    lost: np.ndarray
    skipped: np.ndarray
    scales: np.ndarray


def loss_fn(params: Any, batch: Any, rng: Any, round_to: Any = lambda x: x, tanh: Any = jnp.tanh) -> Any:
    """Return the squared error of a chain of layers, each of which passes on 2⁻¹² of its gradient.

    `round_to` and `tanh` round what float16 would round, and the gradients by it.
    """
    del rng

    @jt.block
    def product(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return round_to(round_to(x) @ round_to(kernel)).astype(np.float32)

    @jt.block
    def layer(kernel: jax.Array, x: jax.Array) -> jax.Array:
        x = jt.hook(x.astype(np.float32), lambda gradient: APART * gradient)
        return tanh(round_to(round_to(x) @ round_to(kernel))).astype(np.float32)

    x, _ = jax.lax.scan(lambda x, kernel: (layer(kernel, x), None), batch["x"], params["layers"])
    return jt.Loss(jnp.square(product(params["head"], x) - batch["y"]).sum(), weight=1), {}


@jax.custom_vjp
def to_11_bits(x: jax.Array) -> jax.Array:
    """Round a float32 and its gradient to the bits of float16, with the exponents of float32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


to_11_bits.defvjp(lambda x: (to_11_bits(x), None), lambda _, gradient: (to_11_bits(gradient),))


@jax.custom_vjp
def tanh_in_11_bits(x: jax.Array) -> jax.Array:
    """Return tanh rounded to 11 bits, the gradient of which is computed from the rounded value, as in float16."""
    return to_11_bits(jnp.tanh(x))


def _tanh_backward(y: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = to_11_bits(gradient)
    grown = to_11_bits(gradient + to_11_bits(gradient * y))
    return (to_11_bits(grown * to_11_bits(1 - y)),)


tanh_in_11_bits.defvjp(lambda x: (tanh_in_11_bits(x),) * 2, _tanh_backward)


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


in_11_bits = partial(loss_fn, round_to=to_11_bits, tanh=tanh_in_11_bits)


def _recorded() -> optax.GradientTransformation:
    """Keep the gradient in the optimizer's state."""
    return optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, grads))


@jax.jit
def _gradient(params: Any, batch: Any) -> Any:
    return jax.grad(lambda params: loss_fn(params, batch, None)[0].total)(params)


def train(precision: str, updates: int, loss_scale: Any = None, loss_fn: Any = loss_fn) -> Run:
    """Train the model from the same parameters on the same batches."""
    # Squares of elements below 3e-18 underflow in float32: with a smaller eps their updates would exceed the rate.
    optimizer = optax.chain(_recorded(), optax.adam(2e-3, eps=1e-17))
    step = jt.train_step(loss_fn, optimizer, precision=precision, loss_scale=loss_scale)
    state, found, data = step.init(parameters(seed=0)), [], batches(updates)
    for x, y in zip(data["x"], data["y"], strict=True):
        batch = {"x": x, "y": y}
        truth = jax.tree.leaves(_gradient(state.params, batch))
        state, metrics = step(state, batch)
        gradient = jax.tree.leaves(state.opt_state[0])
        lost = sum(((g == 0) & (t != 0)).sum() for g, t in zip(gradient, truth, strict=True))
        share = np.nan if metrics["skipped"] else lost / sum(np.count_nonzero(t) for t in truth)
        scales = metrics.get("loss_scales", jnp.full(BLOCKS, metrics["loss_scale"]))
        found.append((metrics["loss"], share, metrics["skipped"], scales))
    return Run(*map(np.stack, zip(*jax.device_get(found), strict=True)))


def runs(updates: int) -> dict[str, Run]:
    """Train in float32, also rounded to 11 bits, and in float16 with one scale, scales by layer and adaptive ones."""
    return {
        "float32": train("fp32", updates),
        "float32, rounded to 11 bits": train("fp32", updates, loss_fn=in_11_bits),
        "float16, one scale": train("fp16", updates, jt.dynamic_loss_scale(growth_interval=10)),
        "float16, by layer": train("fp16", updates, jt.per_layer_loss_scale(BLOCKS, growth_interval=10)),
        ADAPTIVE_RUN: train("fp16", updates, adaptive()),
    }


def adaptive() -> optax.GradientTransformationExtraArgs:
    """Return the scaler of the adaptive run."""
    return jt.per_layer_loss_scale(BLOCKS, underflow=1e-6, growth_interval=10)


def distance(run: Run, truth: Run) -> float:
    """Return the root mean square over all updates of the relative difference of two losses."""
    return float(np.sqrt(np.square(run.losses / truth.losses - 1).mean()))


def draw(found: dict[str, Run]) -> None:
    """Draw the losses, and the scales of the layers."""
    losses = {(css, name.removeprefix("float16, ")): _smooth(found[name].losses) for name, css in COLORS.items()}
    adaptive = found[ADAPTIVE_RUN].scales.T[:LAYERS]  # the scale of the head is that of the last layer
    scales = {(f"c{layer}", f"layer {layer}"): np.log2(scale) for layer, scale in enumerate(adaptive)}
    scales["c7 dashed", "one scale"] = np.log2(found["float16, one scale"].scales[:, 0])
    charts = [_chart("Loss in float16, mean of 10 updates", losses), _chart("log₂ of the loss scales", scales)]
    (HERE / "layer_scales.svg").write_text(svg(charts, 600))


def _chart(title: str, lines: dict[tuple[str, str], np.ndarray]) -> Chart:
    last = max(map(len, lines.values()))
    x, y = between(0, last, whole(0, last)), linear(np.concatenate([*lines.values()]))
    curves = [(css, curve(enumerate(values), x, y)) for (css, _), values in lines.items()]
    return Chart(title, x, [Panel("", y, curves, height=220)], "update", [*lines])


def _smooth(losses: np.ndarray, over: int = 10) -> np.ndarray:
    return np.convolve(losses, np.full(over, 1 / over), mode="valid")


def table(found: dict[str, Run]) -> str:
    """Return what each run lost, and its last loss, as rows of a Markdown table."""
    rows = (
        f"| {name} | {np.nanmean(run.lost):.2%} | {np.nanmax(run.lost):.2%} | {run.skipped.sum()} "
        f"| {run.losses[-20:].mean():.1f} | {distance(run, found['float32']):.3%} |"
        for name, run in found.items()
    )
    return "\n".join(rows)


if __name__ == "__main__":
    measured = runs(updates=400)
    print(table(measured))
    draw(measured)
