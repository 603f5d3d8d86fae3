"""Check that training a small GPT-2 is as precise as PyTorch 2.13 was on a CPU.

`gpt2.npz` contains PyTorch's side, so that PyTorch need not be installed: initial weights, the training in float64, and
PyTorch's distance from it in each lower precision (`parity.selftest.record_reference`).
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import jaxtrain
from jaxtrain import optim
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.models.gpt2 import torch_names
from parity.bars import FIRST_BAR, LAST_BAR, RATIO_BAR, SINGLE
from parity.case import AdamW, Batch, Case
from parity.compare.verdict import relative
from parity.record import Record, Tensors
from parity.selftest.bits import describe_difference, on_host, unlike
from parity.selftest.check_result import CheckResult, within
from parity.sides import jax_side

CONFIG = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
ROWS, STEPS = 8, 5
LOW = ("fp32", "bf16", "fp16")
GROUPS = ("losses", "first gradient", "parameters")
LOSSES_BAR = 5.5
"""The distance of few numbers is a matter of chance: the ratio of the norms of 5 and 5 normal errors of the same size
exceeds this once in a thousand times (F distribution, 5 and 5 degrees of freedom)."""
RECORDED = Path(__file__).with_name("gpt2.npz")


def precision() -> Iterator[CheckResult]:
    """Train for STEPS steps in float64 and in each lower precision."""
    ours, weights = case(), recorded("weights")
    truth = {what: recorded(what) for what in GROUPS}
    run = groups(jax_side.run(ours, weights, "fp64", steps=STEPS))
    apart = {what: relative(run[what], truth[what]) for what in GROUPS}
    first = max(apart["losses"]["1"], *apart["first gradient"].values())
    yield within("GPT-2, fp64, first step", first, FIRST_BAR, "loss and gradients, distance from PyTorch")
    last = max(*apart["losses"].values(), *apart["parameters"].values())
    yield within(f"GPT-2, fp64, {STEPS} steps", last, LAST_BAR, "losses and parameters, distance from PyTorch")
    for low in LOW:
        yield _as_near(low, jax_side.run(ours, weights, low, steps=STEPS), truth)


def determinism() -> Iterator[CheckResult]:
    """Run one bf16 step three times from the same state on the same batch."""
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, dropout=0.1)
    step = jaxtrain.train_step(loss_of(config), optim.adamw(1e-3), precision="bf16", clip_norm=1.0)
    params = functional(GPT2(config, rngs=nnx.Rngs(0)))[1]
    batch = {"tokens": np.random.default_rng(0).integers(256, size=(16, 65), dtype=np.int32)}
    program = step.compile(step.init(params, seed=0), batch)
    results = [on_host(program(step.init(params, seed=0), batch)) for _ in range(3)]
    apart = sorted({name for again in results[1:] for name in unlike(results[0], again)})
    hint = "; XLA_FLAGS=--xla_gpu_deterministic_ops=true excludes such kernels" if apart else ""
    yield CheckResult("determinism", not apart, describe_difference(apart, results[0]) + hint)


def case() -> Case:
    """Return the case; its PyTorch side is that of `parity.cases.built_in.gpt2_case`, which imports PyTorch."""

    def theirs() -> Case:
        from parity.cases.built_in import gpt2_case

        return gpt2_case.case(CONFIG, reference=CONFIG)

    return Case(
        name="gpt2-selftest",
        torch_model=lambda: theirs().torch_model(),
        torch_loss=lambda model, batch: theirs().torch_loss(model, batch),
        loss_fn=loss_of(CONFIG),
        params_like=functional(nnx.eval_shape(lambda: GPT2(CONFIG, rngs=nnx.Rngs(0))))[1],
        names=torch_names(),
        batch=_batch,
        rows=ROWS,
        # With the default eps, Adam makes steps of the rounding noise that is the gradient of the key bias.
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=0.6,
    )


def loss_of(config: GPT2Config) -> Any:
    """The cross entropy of each token but the first, given those before it."""
    apply, _ = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        tokens = batch["tokens"]
        logits, labels = apply(params, tokens[:, :-1], rng), tokens[:, 1:]
        losses = cross_entropy(logits.reshape(labels.size, -1), labels.reshape(-1))
        return jaxtrain.Loss(losses.sum(), weight=losses.size), {}

    return loss_fn


def _batch(seed: int, rows: int) -> Batch:
    # Whose stream stays what it is: https://numpy.org/neps/nep-0019-rng-policy.html
    stream = np.random.RandomState(seed)
    return {"tokens": stream.randint(CONFIG.vocab_size, size=(rows, CONFIG.n_positions + 1))}


def _as_near(low: str, run: Record, truth: Mapping[str, Tensors]) -> CheckResult:
    """Whether a run is about as far from the truth as PyTorch's."""
    name, theirs = f"GPT-2, {low}, {STEPS} steps", recorded("distances")[low]
    if not np.array_equal(run.scales, recorded("scales")[low]):
        return CheckResult(
            name, False, f"loss scales {run.scales.tolist()}, PyTorch's {recorded('scales')[low].tolist()}"
        )
    # A loss is float32: below one unit in its last place, distances are a matter of chance.
    floor = np.array([SINGLE * np.linalg.norm(list(truth["losses"].values())), 0, 0])
    ratios = distances(groups(run), truth) / np.maximum(theirs, floor)
    bars = np.array([LOSSES_BAR, RATIO_BAR, RATIO_BAR])
    worst = int(np.argmax(ratios / bars))
    return within(name, ratios[worst], bars[worst], f"{GROUPS[worst]}: distance to the truth over PyTorch's own")


def groups(run: Record) -> dict[str, Tensors]:
    """What is compared of a run, by GROUPS."""
    losses = {str(i): loss for i, loss in enumerate(run.losses, start=1)}
    return dict(zip(GROUPS, (losses, run.grads, run.last.params), strict=True))


def distances(run: Mapping[str, Tensors], truth: Mapping[str, Tensors]) -> np.ndarray:
    """[GROUPS], float64: ‖run − truth‖ over all tensors of each group."""
    apart = [[np.float64(run[what][name]) - x for name, x in truth[what].items()] for what in GROUPS]
    return np.array([np.linalg.norm(np.concatenate([np.ravel(x) for x in of])) for of in apart])


@cache
def recorded(what: str) -> Tensors:
    """Return the arrays of PyTorch's side under "what/"."""
    with np.load(RECORDED) as arrays:
        return {name.removeprefix(f"{what}/"): arrays[name] for name in arrays.files if name.startswith(f"{what}/")}
