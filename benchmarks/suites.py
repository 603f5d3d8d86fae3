"""The suites: the jobs that a command times, in groups that are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import features, host, run, updates
from benchmarks.engines import TORCH_ATTENTION
from benchmarks.job import Job
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class Suite:
    """Jobs to time.

    Attributes:
      groups: Jobs that are timed interleaved; the first of each group is the one the others are compared with.
      rounds: Turns of each job.
      ceilings: Precisions in which the machine's ceilings are measured.
    """

    groups: Sequence[Sequence[Job]]
    rounds: int
    ceilings: Sequence[str]


def with_jax(workload: str, precision: str, *engines: str, **settings: Any) -> list[Job]:
    """Return the jobs of JAX and of the given engines."""
    return [Job(workload, engine, precision, **settings) for engine in ("jax", *engines)]


BOTH = ("torch_eager", "torch_compile")
SCALED = ("jax", "torch_eager")
SUITES: Mapping[str, Suite] = {
    "cpu": Suite(
        [
            with_jax("gpt2-tiny", "fp32", *BOTH),
            with_jax("gpt2-tiny", "bf16", *BOTH),
            with_jax("mlp-launch-bound", "fp32", *BOTH),
            with_jax("mlp-launch-bound", "bf16", *BOTH),
            with_jax("resnet18", "fp32", "torch_eager"),
        ],
        rounds=20,
        ceilings=["fp32", "bf16"],
    ),
    "gpu": Suite(
        [
            [Job("gpt2-124m", "jax", "bf16", feature="loop"), *with_jax("gpt2-124m", "bf16", *BOTH)],
            [
                *with_jax("gpt2-124m", "bf16"),
                *(Job("gpt2-124m", "torch_eager", "bf16", feature=kernel) for kernel in TORCH_ATTENTION),
                Job("gpt2-124m", "torch_compile", "bf16", feature="cuDNN"),
            ],
            with_jax("gpt2-124m", "fp16", *BOTH),
            with_jax("gpt2-124m", "bf16_compute", *BOTH),
            with_jax("gpt2-124m", "bf16", "torch_eager", remat="full"),
            with_jax("resnet50", "bf16", *BOTH),
            with_jax("llama-160m", "bf16", "torch_eager"),
            with_jax("llama-1b", "bf16", "torch_eager"),
            with_jax("vit-s", "bf16", "torch_eager"),
            with_jax("mlp-launch-bound", "fp32", *BOTH),
        ],
        rounds=6,
        ceilings=["bf16", "fp16", "fp32"],
    ),
    "optimizers": Suite(
        [[Job(update, engine) for engine in updates.ENGINES] for update in updates.UPDATES], rounds=20, ceilings=[]
    ),
    "host": Suite(
        [
            with_jax("mlp-host", "fp32", *BOTH),
            *([Job(workload, engine) for engine in host.ENGINES] for workload in host.INPUTS),
        ],
        rounds=20,
        ceilings=[],
    ),
    "features": Suite(
        [
            [
                Job("gpt2-tiny", "jax", feature=feature)
                for feature in ("bare", "no clipping", "", "loss scaling", "ema")
            ],
            [Job("gpt2-tiny", "jax"), Job("gpt2-tiny", "jax", accumulate=4), Job("gpt2-tiny", "jax", "bf16")],
            [
                Job("gpt2-tiny", "jax", accumulate=8, sizes={"rows": 96}, feature=feature)
                for feature in (features.MICRO_STEPS, "")
            ],
            [Job("gpt2-tiny", "jax"), *(Job("gpt2-tiny", "jax", remat=policy) for policy in ("dots", "full"))],
            with_jax("gpt2-tiny", "fp32", "torch_eager", remat="full", sizes={"length": 256}),
            [Job(run.WORKLOAD, "jax", feature=feature) for feature in run.STEPS],
            [Job(run.WORKLOAD, "jax", feature=feature) for feature in run.SAVES],
        ],
        rounds=20,
        ceilings=[],
    ),
    "scaling": Suite(
        [
            [Job("gpt2-tiny", engine, sizes={size: value}) for value in values for engine in SCALED]
            for size, values in {"rows": (4, 8, 16, 32), "length": (32, 64, 128, 256), "depth": (1, 2, 4, 8)}.items()
        ]
        + [[Job("gpt2-tiny", engine, accumulate=k, sizes={"rows": 12 * k}) for k in (2, 4, 8) for engine in SCALED]],
        rounds=8,
        ceilings=[],
    ),
}


def select(name: str, workloads: Sequence[str] = (), precisions: Sequence[str] = ()) -> Suite:
    """Return the suite called `name`, reduced to the given workloads and precisions.

    Args:
      name: A key of `SUITES`.
      workloads: Workloads to keep; empty keeps all.
      precisions: Precisions to keep; empty keeps all.

    Raises:
      UserError: The suite, a workload or a precision is unknown, or no row has both.
    """
    if name not in SUITES:
        raise UserError(f"unknown suite {name!r}: choose from {', '.join(SUITES)}")
    suite = SUITES[name]
    jobs = [job for group in suite.groups for job in group]
    for flag, given, known in (
        ("--workload", workloads, dict.fromkeys(job.workload for job in jobs)),
        ("--precision", precisions, dict.fromkeys(job.precision for job in jobs)),
    ):
        for value in given:
            if value not in known:
                raise UserError(f"{flag} {value!r} is not in suite {name}: choose from {', '.join(known)}")
    selected = [
        [
            job
            for job in group
            if (not workloads or job.workload in workloads) and (not precisions or job.precision in precisions)
        ]
        for group in suite.groups
    ]
    groups = [group for group in selected if group]
    if not groups:
        pairs = ", ".join(dict.fromkeys(f"{job.workload} in {job.precision}" for job in jobs))
        raise UserError(f"suite {name} has no row of both --workload and --precision: choose from {pairs}")
    measured = {job.product_precision for group in groups for job in group}
    return replace(suite, groups=groups, ceilings=[precision for precision in suite.ceilings if precision in measured])
