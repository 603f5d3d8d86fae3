"""Learning rates for larger batches, by the linear and the square-root rule."""

import math
from typing import NamedTuple

from jaxtrain.errors import UserError


class EffectiveBatch(NamedTuple):
    """The number of examples per update.

    Attributes:
      micro_batch: Examples per micro-batch and device.
      accumulate: Micro-batches per window.
      devices: Number of devices.

    Example:
      >>> batch = EffectiveBatch(micro_batch=32, accumulate=4, devices=8)
      >>> print(batch)
      effective batch 1024 = 32 × 4 micro-batches × 8 devices
      >>> batch.linear_lr(0.1, at=256), batch.sqrt_lr(0.1, at=256)
      (0.4, 0.2)
    """

    micro_batch: int
    accumulate: int = 1
    devices: int = 1

    @property
    def size(self) -> int:
        """Examples per update."""
        return self.micro_batch * self.accumulate * self.devices

    def linear_lr(self, lr: float, *, at: int) -> float:
        """Scale a learning rate by the ratio of the batches, for SGD (Goyal et al. 2017, section 2.1).

        Args:
          lr: Learning rate tuned at batch `at`.
          at: Effective batch that `lr` was tuned at.

        Returns:
          The learning rate for this batch.
        """
        return lr * self._ratio(at)

    def sqrt_lr(self, lr: float, *, at: int) -> float:
        """Scale a learning rate by the square root of the ratio, for Adam (Malladi et al. 2022, section 5).

        Args:
          lr: Learning rate tuned at batch `at`.
          at: Effective batch that `lr` was tuned at.

        Returns:
          The learning rate for this batch.
        """
        return lr * math.sqrt(self._ratio(at))

    def _ratio(self, at: int) -> float:
        if at < 1:
            raise UserError(f"at must be at least 1, got {at}: pass the batch that the learning rate was tuned at")
        return self.size / at

    def __str__(self) -> str:
        factors = f"{self.micro_batch} × {self.accumulate} micro-batches × {self.devices} devices"
        return f"effective batch {self.size} = {factors}"
