"""Propose and prove which PyTorch tensor each JAX parameter is.

Shapes leave few candidates: a tensor as it is, transposed, with the axes of a convolution permuted, after a flattened
image, or one of a stack of layers. Values decide what shapes leave open. All tensors that could be mistaken for each
other get the same value, equal to its own transpose, so that the two models agree under any assignment. Then one
tensor is perturbed in PyTorch: its counterpart, and its layout, are those that change JAX's loss by the same amount.
Names that both sides share come before values, so that a port with two layers exchanged differs; other names and the
order decide what values leave open, a module at a time. If the models differ, values tell a square kernel from its
transpose no better than chance: it gets the layout of the other kernels of its class. Both losses are then compared
under random weights: they prove the table, or what is in doubt is named.
"""

from parity.weights.probe import Probe, probe_of
from parity.weights.proof import Proof, prove
from parity.weights.proposal import Proposal, as_source, completed, proposal_of, propose, proposed, with_tables

__all__ = [
    "Probe",
    "Proof",
    "Proposal",
    "as_source",
    "completed",
    "probe_of",
    "proposal_of",
    "propose",
    "proposed",
    "prove",
    "with_tables",
]
