"""The stages of a verdict, in order; the first that differs decides."""

import secrets
from pathlib import Path

import jax

from parity.verify.behaviour import behaviour
from parity.verify.contract import read_contract
from parity.verify.difference import Difference
from parity.verify.interface import interface
from parity.verify.lines import with_owner
from parity.verify.numbers_stage import numbers
from parity.verify.planted import planted
from parity.verify.source_case import source_case
from parity.verify.verdict import PortVerdict

LARGEST_SEED = 2**31
"""Bound of drawn seeds."""


def verify(source: Path, target: Path, contract: Path, seed: int | None = None) -> PortVerdict:
    """Return the verdict on a port: whether it is the training of its source.

    Args:
      source: The PyTorch file.
      target: The JAX file.
      contract: The TOML file that names how both are built and stepped.
      seed: Seed of weights and data; None draws one that the author of the port cannot know.

    Returns:
      The verdict.

    Raises:
      UserError: The contract or a file is unusable.
    """
    seed = secrets.randbelow(LARGEST_SEED) if seed is None else seed
    theirs, ours = read_contract(contract, source, target)
    verdict = PortVerdict(source, target, seed)
    # The defaults of JAX, for which a port is written.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        case = source_case(theirs, seed)
        for name, stage in {"interface": interface, "numbers": numbers, "behaviour": behaviour}.items():
            found = stage(case, ours, seed)
            if isinstance(found, Difference):
                return PortVerdict(source, target, seed, verdict.held, with_owner(found, case))
            verdict.held[name] = found
        is_exact = "losses" in verdict.held["numbers"].figures
        bugs = planted(case, ours, seed) if is_exact else None
    return PortVerdict(source, target, seed, verdict.held, None, bugs)
