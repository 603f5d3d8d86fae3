"""Part 4: each pass for GPUs, with and without, on GPT-2 124M with the loop over layers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks.features import train_step
from benchmarks.gpu_check.lines import emit, note
from benchmarks.gpu_check.pairs import GPT2, Steps, beside
from jaxtrain.passes.pipeline import AFTER_GRAD, BEFORE_GRAD, GPU, Pass
from jaxtrain.step import LossProgram

IN_8_BITS = ("fuse_casts",)
"""Passes of programs with products in 8 bits."""


def gpu_passes() -> list[Pass]:
    """Return the passes of programs for GPUs alone, those of products in 8 bits last."""
    found = [x for x in (*BEFORE_GRAD, *AFTER_GRAD) if x.platforms == (GPU,)]
    return sorted(found, key=lambda x: x.name in IN_8_BITS)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Leave a pass out of the programs that are traced meanwhile."""

    def reduced(method: Any) -> Any:
        def rewrites(*args: Any, **kwargs: Any) -> Any:
            return {key: rewrite for key, rewrite in method(*args, **kwargs).items() if key != name}

        return rewrites

    methods = {key: reduced(getattr(LossProgram, key)) for key in ("rewrites", "of_gradient")}
    with mock.patch.multiple(LossProgram, **methods):
        yield


def main(rehearse: bool) -> None:
    """Print a result for each pass."""
    steps = Steps("gpt2-124m", GPT2[rehearse])
    bases: dict[str, Any] = {}
    for x in gpu_passes():
        precision = "fp8" if x.name in IN_8_BITS else "bf16"
        job = replace(steps.job, precision=precision)
        if precision not in bases:
            note(f"compiling in {precision}")
            bases = {precision: steps.variant(train_step(steps.case, job), precision)}
        base = bases[precision]
        note(f"without {x.name}")
        with without(x.name):
            other = steps.variant(train_step(steps.case, job), precision)
        emit(
            "without a pass",
            without=x.name,
            precision=precision,
            **beside(base, other),
            losses_apart=max(abs(a - b) for a, b in zip(base.losses[:3], other.losses[:3], strict=True)),
            predicted_of_base=_share(other.predicted, base.predicted, "predicted_s"),
            predicted_moved_of_base=_share(other.predicted, base.predicted, "predicted_moved_bytes"),
            predicted_peak_of_base=_share(other.predicted, base.predicted, "predicted_peak_bytes"),
            gain_in_pipeline=x.gain,
        )


def _share(of: Any, base: Any, name: str) -> float | None:
    return of[name] / base[name] if name in base else None


if __name__ == "__main__":
    main("--rehearse" in sys.argv)
