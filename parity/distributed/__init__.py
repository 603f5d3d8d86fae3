"""The same training over several devices: in JAX on a mesh, in PyTorch in one process per device."""

from parity.distributed.mesh_training import Scaling, Training

__all__ = ["Scaling", "Training"]
