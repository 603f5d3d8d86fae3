"""Proof that a JAX training step is the one PyTorch would have made, on your own model."""

from parity.case import AdamW, Case
from parity.compare import Verdict
from parity.run import check

__all__ = ["AdamW", "Case", "Verdict", "check"]
