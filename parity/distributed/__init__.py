"""The same training over several devices: in JAX on a mesh, in PyTorch in one process per device."""

from parity.distributed.training import Scaling, Training

__all__ = ["Scaling", "Training"]
