"""Part 5: what precisions, windows and deterministic kernels cost GPT-2 124M, and fp16 that skips overflows."""

import itertools
import sys
from dataclasses import replace

from benchmarks.features import train_step
from benchmarks.gpu_check.lines import emit, note
from benchmarks.gpu_check.pairs import GPT2, Steps, beside
from jaxtrain import dynamic_loss_scale
from jaxtrain import train_step as jaxtrain_step

STEPS = 20
"""Steps after which the losses of two precisions are compared."""
TOO_LARGE = 2.0**40
"""A loss scale that overflows."""
VARIANTS = (
    ("bf16", 1, "deterministic"),
    ("bf16_compute", 1, "loop"),
    ("fp16", 1, "loop"),
    ("fp8", 1, "loop"),
    ("fp8_delayed", 1, "loop"),
    ("fp16", 4, "loop"),
)
"""Precision, micro-batches and feature of what is timed beside bf16."""


def main(rehearse: bool) -> int:
    """Print a result for each variant; return 1 if the loss scale does not follow the overflows."""
    steps = Steps("gpt2-124m", GPT2[rehearse])
    note("compiling in bf16")
    base = steps.variant(train_step(steps.case, steps.job))
    for precision, accumulate, feature in VARIANTS:
        note(f"{precision}, {accumulate} micro-batches, {feature}")
        job = replace(steps.job, precision=precision, accumulate=accumulate, feature=feature)
        other = steps.variant(train_step(steps.case, job), precision)
        timed = beside(base, other)
        emit(
            "beside bf16",
            precision=precision,
            micro_batches=accumulate,
            feature=feature,
            **timed,
            first_loss=other.losses[0],
            loss_after=other.losses[STEPS - 1],
            bf16_first_loss=base.losses[0],
            bf16_loss_after=base.losses[STEPS - 1],
            **other.predicted,
        )
    return _skips(steps)


def _skips(steps: Steps) -> int:
    """Train in fp16 in windows, from a scale that overflows, and print the course of the scale."""
    step = jaxtrain_step(
        steps.case.loss_fn,
        steps.case.optimizer.jax,
        precision="fp16",
        accumulate=2,
        clip_norm=1.0,
        loss_scale=dynamic_loss_scale(init_scale=TOO_LARGE, growth_interval=1000),
    )
    seen = steps.states(step, 2 * STEPS)
    scales, skipped = [float(x["loss_scale"]) for x in seen], [bool(x["skipped"]) for x in seen]
    pairs = zip(itertools.pairwise(scales), skipped[:-1], strict=True)
    halved = all(after == before / (2 if skip else 1) for (before, after), skip in pairs)
    right = halved and skipped[0] and not skipped[-1] and float(seen[-1]["loss"]) < float(seen[0]["loss"])
    emit("fp16 with skips", right=right, skips=sum(skipped), scales=scales, losses=[float(x["loss"]) for x in seen])
    return int(not right)


if __name__ == "__main__":
    sys.exit(main("--rehearse" in sys.argv))
