"""Learning rates for larger batches: the two rules, which state the effective batch they are for."""

import math
from typing import NamedTuple

from jaxtrain.errors import UserError


class EffectiveBatch(NamedTuple):
    """The examples to an update: those of a micro-batch × micro-batches to a window × devices.

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
        """The product."""
        return self.micro_batch * self.accumulate * self.devices

    def linear_lr(self, lr: float, *, at: int) -> float:
        """`lr`, tuned at batch `at`, times the ratio of the batches: for SGD (Goyal et al. 2017, section 2.1)."""
        return lr * self._ratio(at)

    def sqrt_lr(self, lr: float, *, at: int) -> float:
        """`lr` times the square root of the ratio: for Adam and its kin (Malladi et al. 2022, section 5)."""
        return lr * math.sqrt(self._ratio(at))

    def _ratio(self, at: int) -> float:
        if at < 1:
            raise UserError(f"a learning rate tuned at batch {at} says nothing: give the batch it was tuned at")
        return self.size / at

    def __str__(self) -> str:
        factors = f"{self.micro_batch} × {self.accumulate} micro-batches × {self.devices} devices"
        return f"effective batch {self.size} = {factors}"
