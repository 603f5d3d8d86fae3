"""The step for a GPU has no branch, at which the host would wait for the device; its numbers are those of the CPU's."""

import jax
import numpy as np
import optax
import pytest
from jax import lax

import jaxtrain as jt

K, ROWS = 3, 2
PARAMS = {"a": np.linspace(-1, 1, 3, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
# By micro-batch: the one row whose target is replaced, and by what. The gradient of 1e30 is finite, its norm is not.
TARGETS = {1: (0, np.nan), 5: (1, np.inf), 6: (0, 1e30), 8: (1, -np.inf)}


def loss_fn(params, batch, rng):
    a, b = ((batch["x"] @ x.T).reshape(ROWS, -1).sum(1) for x in params.values())
    return jt.Loss(((a - batch["y"]) ** 2 + (b - batch["y"][::-1]) ** 2).sum(), weight=ROWS), {}


def micro_batches():
    rng = np.random.default_rng(0)
    for i in range(4 * K):
        y = rng.standard_normal(ROWS).astype(np.float32)
        if i in TARGETS:
            row, y[row] = TARGETS[i]
        yield {"x": rng.standard_normal((ROWS, 3)).astype(np.float32), "y": y}


def windows(k):
    pieces = list(micro_batches())
    for i in range(0, len(pieces), k):
        yield jax.tree.map(lambda *x: np.concatenate(x), *pieces[i : i + k])


def run(scaler, k, streaming):
    """Return the states and metrics of every call, and whether a compiled program has a branch."""
    step = jt.train_step(loss_fn, optax.adam(0.1), accumulate=k, clip_norm=0.5, loss_scale=scaler)
    call, batches = (step._micro, micro_batches()) if streaming else (step.jitted, windows(k))
    state, kept = step.init(PARAMS, streaming=streaming), []
    text = call.lower(state, next(windows(1 if streaming else k))).compile().as_text()
    if streaming:
        text += step._flush.lower(state).compile().as_text()
    for batch in batches:
        state, metrics = call(state, batch)
        kept.append(jax.device_get((state._replace(rng=jax.random.key_data(state.rng)), metrics)))
    return kept, " conditional(" in text


@pytest.mark.parametrize(
    ("scaled", "k", "streaming"), [(False, 1, False), (True, 1, False), (True, K, False), (True, K, True)]
)
def test_a_gpu_runs_no_branch_and_finds_what_a_cpu_finds(monkeypatch, scaled, k, streaming):
    scaler = jt.dynamic_loss_scale(2.0**4, growth_interval=2) if scaled else None
    expected, branches = run(scaler, k, streaming)
    assert branches
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **platforms: default(*args))
    found, branches = run(scaler, k, streaming)
    assert not branches
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    if scaled:
        assert {bool(metrics["skipped"]) for _, metrics in found} == {False, True}
