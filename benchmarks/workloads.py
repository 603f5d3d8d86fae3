"""What is timed: parity cases, at sizes worth timing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from parity.case import Case


@dataclass(frozen=True)
class Workload:
    """A case of `make(**sizes)`, of which a job may change some. `proof` names the case of `parity run` that shows, at
    a small size, that the work is the same. Throughput counts `unit`s; `images`: PyTorch has them in its fastest
    layout."""

    make: Callable[..., Case]
    sizes: Mapping[str, int]
    proof: str
    unit: str
    images: bool = False

    def case(self, sizes: Mapping[str, int]) -> Case:
        """Of its own sizes, but for those given."""
        return self.make(**{**self.sizes, **sizes})

    def units(self, sizes: Mapping[str, int]) -> int:
        """How many a step counts."""
        of = {**self.sizes, **sizes}
        return of["rows"] * of.get("length", 1)


def _gpt2(vocab_size: int, width: int, depth: int, heads: int, rows: int, length: int) -> Case:
    from jaxtrain.models import GPT2Config
    from parity.cases import gpt2

    config = GPT2Config(vocab_size=vocab_size, n_positions=length, n_embd=width, n_layer=depth, n_head=heads)
    return gpt2.case(config, reference=config, rows=rows, tokens=length + 1)


def _mlp(rows: int) -> Case:
    from parity.cases import mlp

    return replace(mlp.case(), rows=rows)


TINY = {"vocab_size": 256, "width": 128, "depth": 4, "heads": 4, "rows": 12, "length": 64}
# The vocabulary of 50257 is padded to a multiple of 128, on both sides.
SMALL = {"vocab_size": 50304, "width": 768, "depth": 12, "heads": 12, "rows": 16, "length": 1024}
WORKLOADS = {
    "gpt2-tiny": Workload(_gpt2, TINY, "gpt2", "tokens"),
    "gpt2-124m": Workload(_gpt2, SMALL, "gpt2", "tokens"),
    "mlp-launch-bound": Workload(_mlp, {"rows": 16}, "mlp", "examples"),
}
