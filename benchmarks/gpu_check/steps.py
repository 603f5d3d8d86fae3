"""Parts 2 and 7: training steps of JAX beside PyTorch's, by the machinery of `python -m benchmarks`."""

import argparse
from collections.abc import Sequence

import benchmarks.suites
from benchmarks.budget import Budget
from benchmarks.cli import figures_of
from benchmarks.gpu_check.lines import emit, note
from benchmarks.job import Job
from benchmarks.measure import Results, measure
from benchmarks.suites import Suite, with_jax

LANGUAGE = {"vocab_size": 512, "width": 64, "depth": 2, "heads": 2, "rows": 2, "length": 64}
ROUNDS = 6
SUITES = {
    "gpt2": (
        benchmarks.suites.SUITES["gpu"].groups[:1],
        [
            [
                Job("gpt2-tiny", "jax", "bf16", feature="loop", sizes=LANGUAGE),
                *with_jax("gpt2-tiny", "bf16", "torch_eager", sizes=LANGUAGE),
            ]
        ],
    ),
    "others": (
        [
            with_jax("llama-1b", "bf16", "torch_eager"),
            with_jax("resnet50", "bf16", "torch_eager"),
            with_jax("vit-s", "bf16", "torch_eager"),
            with_jax("llama-160m", "bf16", "torch_eager"),
            benchmarks.suites.SUITES["gpu"].groups[1],
        ],
        [
            with_jax("llama-160m", "bf16", "torch_eager", sizes={**LANGUAGE, "hidden": 64, "keys": 1}),
            with_jax("resnet18", "bf16", "torch_eager", sizes={"rows": 2, "side": 32}),
            with_jax("vit-s", "bf16", "torch_eager", sizes={"depth": 2, "rows": 2, "side": 32}),
        ],
    ),
}
"""Groups by name: on a GPU, and in a rehearsal."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows and ratios of each group as soon as it is measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=SUITES)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(argv)
    groups = SUITES[options.name][options.rehearse]
    printed = {"rows": 0, "ratios": 0, "ceilings": 0}

    def save(results: Results) -> None:
        figures = figures_of(options.name, results)
        for what in printed:
            for row in figures[what][printed[what] :]:
                emit(what.removesuffix("s"), **{"of" if name == "what" else name: x for name, x in row.items()})
            printed[what] = len(figures[what])

    results = measure(Suite(groups, ROUNDS, ["bf16"]), Budget(options.seconds), note, note, save)
    for line in results.notes:
        emit("note", note=line)


if __name__ == "__main__":
    main()
