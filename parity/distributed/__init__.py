"""The same training over several devices, in JAX on a mesh and in PyTorch in as many processes."""

from parity.distributed.training import Scaling, Training

__all__ = ["Scaling", "Training"]
