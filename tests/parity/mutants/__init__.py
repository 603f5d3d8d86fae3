"""Deliberate bugs by name, in families; each name says what is wrong."""

from parity.mutate.mutant import Mutant
from tests.parity.mutants import (
    attention,
    constants,
    eight_bit,
    fp8,
    kinks,
    layers,
    losses,
    models,
    optimizers,
    schedules,
    steps,
)

FAMILIES = (layers, constants, models, kinks, losses, optimizers, eight_bit, schedules, steps, attention, fp8)
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for family in FAMILIES for mutant in family.MUTANTS}
"""All mutants by name."""
