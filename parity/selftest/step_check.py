"""Check the training step: skipped updates, loss scale, accumulation, rematerialization."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import Loss, TrainStep, train_step
from jaxtrain.passes import block
from jaxtrain.step import dynamic_loss_scale
from parity.bars import FIRST_BAR
from parity.compare.verdict import relative
from parity.selftest.bits import describe_difference, on_host, unlike
from parity.selftest.check_result import CheckResult, within

WIDTH, ROWS, INTERVAL = 16, 8, 3
COURSE = "..!.....!!...."
"""Windows: "." is clean, "!" contains an inf. The scale grows after INTERVAL clean windows."""
LAYERS, DEEP_ROWS = 12, 2**14
"""Large enough that the workspaces of a GPU's products, tens of MiB in any program, do not hide the
rematerialization."""


def perceptron(seed: int = 0) -> dict[str, np.ndarray]:
    """Return the float32 parameters of a perceptron WIDTH-WIDTH-1."""
    rng = np.random.default_rng([1, seed])
    inner = rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
    return {"inner": inner, "outer": rng.standard_normal((WIDTH, 1), np.float32)}


def rows(seed: int, count: int = ROWS) -> dict[str, np.ndarray]:
    """Return a batch of rows with weight 1."""
    rng = np.random.default_rng([2, seed])
    x, y = rng.standard_normal((count, WIDTH), np.float32), rng.standard_normal(count, np.float32)
    return {"x": x, "y": y, "weight": np.ones(count, np.float32)}


def squared_error(params: Any, batch: Mapping[str, Any], rng: Any) -> tuple[Loss, dict[str, Any]]:
    """Return the squared error of the perceptron, with dropout of half its hidden values if there is a key."""
    hidden = jnp.tanh(batch["x"] @ params["inner"])
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.5, hidden.shape), hidden, jnp.zeros_like(hidden))
    error = (hidden @ params["outer"])[:, 0] - batch["y"]
    return Loss((batch["weight"] * error**2).sum(), batch["weight"].sum()), {}


def without_dropout(params: Any, batch: Mapping[str, Any], rng: Any) -> tuple[Loss, dict[str, Any]]:
    """Return `squared_error` without dropout."""
    del rng
    return squared_error(params, batch, None)


def fp16_step() -> TrainStep:
    """Return a step with every kind of state."""
    return train_step(
        squared_error,
        optax.adamw(1e-2),
        precision="fp16",
        accumulate=2,
        clip_norm=1.0,
        ema=0.9,
        # This loss overflows under the default scale.
        loss_scale=dynamic_loss_scale(init_scale=1024.0, growth_interval=INTERVAL),
    )


def overflow() -> Iterator[CheckResult]:
    """Put an inf in one micro-batch of a window: only the loss scale may change, as PyTorch's does."""
    step = fp16_step()
    state = step.init(perceptron(), seed=0)
    scales, changed, missed = [float(state.loss_scale.scale)], set(), []
    unchanged: dict[str, bytes] = {}
    for i, what in enumerate(COURSE):
        batch = rows(i)
        if what == "!":
            batch["x"][ROWS // 2, 0] = np.inf
        before = on_host((state.params, state.opt_state, state.ema))
        state, metrics = step(state, batch)
        after = on_host((state.params, state.opt_state, state.ema))
        scales.append(float(state.loss_scale.scale))
        if bool(metrics["skipped"]) != (what == "!") or (what != "!" and before == after):
            missed.append(i + 1)
        if what == "!":
            changed |= {*unlike(before, after)}
            unchanged = before
    seen = f"windows {missed} of {len(COURSE)} misreported" if missed else f"{COURSE.count('!')} found, no others"
    yield CheckResult("overflow, detection", not missed, seen)
    yield CheckResult("overflow, skipped update", not changed, describe_difference(sorted(changed), unchanged))
    right = expected_scales(COURSE, scales[0])
    steps = [i for i, (a, b) in enumerate(zip(scales, right, strict=True)) if a != b]
    detail = f"{scales[steps[0]]:g} after window {steps[0]}, not {right[steps[0]]:g}" if steps else _course_of(scales)
    yield CheckResult("loss scale", not steps, detail)


def expected_scales(course: str, scale: float) -> list[float]:
    """Return the scales of `torch.amp.GradScaler`: halved by an overflow, doubled by INTERVAL clean windows in a row.

    >>> expected_scales("...!", 8.0)
    [8.0, 8.0, 8.0, 16.0, 8.0]
    """
    scales, clean = [scale], 0
    for what in course:
        clean = 0 if what == "!" else clean + 1
        scale *= 0.5 if what == "!" else 2.0 if clean == INTERVAL else 1.0
        clean %= INTERVAL
        scales.append(scale)
    return scales


def _course_of(scales: Sequence[float]) -> str:
    turns = [scale for scale, before in zip(scales[1:], scales, strict=False) if scale != before]
    return f"{scales[0]:g} → " + " → ".join(f"{scale:g}" for scale in turns)


def accumulation() -> Iterator[CheckResult]:
    """Compare four micro-batches of different weights with the whole batch, in float64."""
    batch = rows(0, count=24)
    batch["weight"][[7, 12, 13, 14, 15, 16, 20, 23]] = 0  # of six rows each, 6, 5, 1 and 4 remain
    updates = [_update(without_dropout, perceptron(), batch, accumulate=k)[0] for k in (4, 1)]
    apart = max(relative(*updates).values())
    yield within("accumulation", apart, FIRST_BAR, "update of 4 uneven micro-batches, distance from one batch")


def rematerialization() -> Iterator[CheckResult]:
    """Compare twelve blocks with dropout, with all values recomputed and with all values stored, in float64."""
    draws = np.random.default_rng(3).standard_normal((LAYERS, WIDTH, WIDTH), np.float32)
    params = {"layers": draws / np.float32(WIDTH**0.5)}
    batch = rows(0, count=DEEP_ROWS)
    stored, recomputed = (_update(deep, params, batch, remat=policy) for policy in ("none", "full"))
    apart = max(relative(recomputed[0], stored[0]).values())
    yield within("rematerialization, update", apart, FIRST_BAR, "distance from the update without")
    share = recomputed[1] / stored[1]
    yield within("rematerialization, memory", share, 0.8, "temporaries relative to those without")


def deep(params: Any, batch: Mapping[str, Any], rng: Any) -> tuple[Loss, dict[str, Any]]:
    """Return the loss of LAYERS blocks with dropout in a scan."""

    @block
    def layer(x: Any, w: Any, key: Any) -> Any:
        hidden = jnp.tanh(jnp.tanh(x @ w) @ w)
        return x + jnp.where(jax.random.bernoulli(key, 0.9, x.shape), hidden, jnp.zeros_like(hidden))

    keys = jax.random.split(rng, LAYERS)
    x, _ = jax.lax.scan(lambda x, of: (layer(x, *of), None), batch["x"], (params["layers"], keys))
    return Loss((x**2).sum(), batch["weight"].sum()), {}


def _update(loss_fn: Any, params: Any, batch: Any, **how: Any) -> tuple[dict[str, np.ndarray], int]:
    """The change of `params` in one float64 step of gradient descent, and the bytes of the program's temporaries."""
    with jax.enable_x64(True):
        step = train_step(loss_fn, optax.sgd(1.0), precision="fp64", **how)
        # NumPy arrays would be truncated to float32 outside of this context.
        params, batch = jax.tree.map(lambda x: jnp.asarray(x, np.float64), (params, batch))
        state = step.init(params, seed=0)
        program = step.compile(state, batch)
        after, _ = program(state, batch)
        changes = {name: np.asarray(x) - np.asarray(params[name]) for name, x in after.params.items()}
    return changes, int(program.memory_analysis().temp_size_in_bytes)
