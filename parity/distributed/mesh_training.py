"""A training over several devices, defined once for both frameworks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parity.case import Case
from parity.settings import fp8_policy

if TYPE_CHECKING:
    from jaxtrain.distributed import Rules


@dataclass(frozen=True)
class Scaling:
    """Settings of both `torch.amp.GradScaler` and `jaxtrain.dynamic_loss_scale`."""

    init_scale: float = 2.0**16
    growth_interval: int = 2000


@dataclass(frozen=True)
class Training:
    """A training of a case on a mesh of devices.

    `steps` is the number of windows of `accumulate` micro-batches each. `case` creates the case, in other processes as
    well, so it must be picklable: a function of a module, or a `functools.partial` of one. `mesh` has the format of
    `jaxtrain train` and determines PyTorch's wrapper: "data=2" is DistributedDataParallel in two processes, "fsdp=2"
    `fully_shard`, "data=2,fsdp=2" and "dcn=2,fsdp=2" its hybrid. `rules` shard JAX's parameters. Each device's share of
    a micro-batch must have the same weight, since PyTorch averages the means of its ranks while JAX divides the sum by
    the weight. `scaling` is the loss scale in any precision; None uses the default scale in fp16 only.

    Raises:
      UserError: The mesh shards by `tensor`; or the precision is an fp8 one, whose scales are those of all devices here
        and those of a rank in PyTorch.
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
            raise UserError(f"mesh {self.mesh!r} shards layers, for which PyTorch has no wrapper: leave tensor out")
        if fp8_policy(self.precision) is not None:
            raise UserError(
                f"precision {self.precision!r} has the scales of all devices, in PyTorch each rank has its own: "
                "use fp64, fp32, bf16 or fp16"
            )
