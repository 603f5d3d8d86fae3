"""The parts, in the order of their worth."""

from dataclasses import dataclass

TOTAL_S = 12 * 60.0
"""Seconds of all parts together; the last one gets what the others leave."""
ROOM_S = 10.0
"""Seconds by which a part ends by itself before its limit."""


@dataclass(frozen=True)
class Part:
    """A command with a limit.

    Attributes:
      number: Its number.
      title: What it settles.
      limit_s: Seconds after which it is stopped.
      arguments: Arguments of the Python interpreter.
      is_paced: Whether it is told its seconds, in which it reduces what does not fit.
    """

    number: int
    title: str
    limit_s: float
    arguments: tuple[str, ...]
    is_paced: bool = False


def _own(module: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu_check.{module}", *arguments)


PARTS = (
    Part(1, "Right: programs that compilers got wrong, and the tests that need a GPU", 80, _own("correct")),
    Part(2, "GPT-2 124M in bf16, beside PyTorch's best", 220, _own("steps", "gpt2"), is_paced=True),
    Part(3, "Attention: beside float64, and its time", 80, _own("attention")),
    Part(4, "Each pass for GPUs, with and without", 100, _own("passes")),
    Part(5, "Precisions, windows and skips", 80, _own("precisions")),
    Part(6, "The same bits after a resume", 50, _own("resume")),
    Part(7, "Llama 1B, ResNet-50, ViT-S and Llama 160M", 380, _own("steps", "others"), is_paced=True),
)
"""Parts 1 to 4, and 5 to 7, take less than 9 minutes."""
