"""Proof that a JAX training step is the one PyTorch would have made, on your own model."""

from parity.case import Case
from parity.compare import Verdict
from parity.optimizer import AdamW, Optimizer
from parity.run import assert_matches, check

__all__ = ["AdamW", "Case", "Optimizer", "Verdict", "assert_matches", "check"]
