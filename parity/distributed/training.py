"""A training over several devices, said once for both frameworks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parity.case import Case

if TYPE_CHECKING:
    from jaxtrain.distributed import Rules


@dataclass(frozen=True)
class Scaling:
    """What `torch.amp.GradScaler` and `jaxtrain.dynamic_loss_scale` both are given."""

    init_scale: float = 2.0**16
    growth_interval: int = 2000


@dataclass(frozen=True)
class Training:
    """`steps` windows of `accumulate` micro-batches each of a case, on a mesh of devices.

    `case` makes the case; other processes make it too, so it is one that `pickle` takes: a function of a module, or a
    `functools.partial` of one. `mesh` is as `jaxtrain train` takes it, and says what PyTorch does: "data=2" is
    DistributedDataParallel in two processes, "fsdp=2" `fully_shard`, "data=2,fsdp=2" its hybrid. `rules` divide JAX's
    parameters. Each device's share of a micro-batch is to weigh the same: PyTorch averages the means of its ranks,
    where JAX divides the sum by the weight. `scaling` is that of the loss, in any precision; None scales in fp16 only,
    by the default. Raises `UserError` for a mesh that divides by `tensor`.
    """

    case: Callable[[], Case]
    mesh: str
    rules: "Rules | None" = None
    precision: str = "fp64"
    accumulate: int = 1
    steps: int = 20
    seed: int = 0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        from jaxtrain.distributed import TENSOR, parse_mesh
        from jaxtrain.errors import UserError

        if parse_mesh(self.mesh)[TENSOR] > 1:
            raise UserError(f"mesh {self.mesh!r} divides layers, for which PyTorch has no wrapper: leave tensor out")
