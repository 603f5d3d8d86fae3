"""What is timed: parity cases, at sizes worth timing."""

from collections.abc import Callable
from dataclasses import dataclass

from parity.case import Case


@dataclass(frozen=True)
class Workload:
    """A case and what its throughput counts: `units` of `unit` a row."""

    make: Callable[[], Case]
    unit: str
    units: int


def _gpt2_tiny() -> Case:
    from jaxtrain.models import GPT2Config
    from parity.cases import gpt2

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    return gpt2.case(config, reference=config, rows=12, tokens=65)


def _mlp_launch_bound() -> Case:
    from parity.cases import mlp

    return mlp.case()


WORKLOADS = {
    "gpt2-tiny": Workload(_gpt2_tiny, "tokens", 64),
    "mlp-launch-bound": Workload(_mlp_launch_bound, "examples", 1),
}
SUITES = {"cpu": ("gpt2-tiny", "mlp-launch-bound")}
