"""The parts, in the order of their worth."""

from dataclasses import dataclass

ROOM_S = 10.0
"""Seconds of a part that ends by itself before its limit."""


@dataclass(frozen=True)
class Part:
    """A command with a limit.

    Attributes:
      number: Its number.
      title: What it settles.
      limit_s: Seconds after which it is stopped.
      arguments: Arguments of the Python interpreter.
    """

    number: int
    title: str
    limit_s: float
    arguments: tuple[str, ...]


def _own(module: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu_check.{module}", *arguments)


PARTS = (
    Part(1, "Right: programs that compilers got wrong, and the tests that need a GPU", 80, _own("correct")),
    Part(2, "GPT-2 124M in bf16, beside PyTorch's best", 190, _own("steps", "gpt2", str(190 - ROOM_S))),
    Part(3, "Attention: beside float64, and its time", 80, _own("attention")),
    Part(4, "Each pass for GPUs, with and without", 100, _own("passes")),
    Part(5, "Precisions, windows and skips", 80, _own("precisions")),
    Part(6, "The same bits after a resume", 50, _own("resume")),
    Part(7, "Llama 1B, ResNet-50, ViT-S and Llama 160M", 130, _own("steps", "others", str(130 - ROOM_S))),
)
"""Their limits add up to less than 12 minutes, those of 1 to 4 and of 5 to 7 to less than 9 each."""
