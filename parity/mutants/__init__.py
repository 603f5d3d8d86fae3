"""Deliberate bugs by name, in families; each name says what is wrong."""

from parity.mutants import attention, constants, eight_bit, kinks, layers, losses, models, optimizers, schedules, steps
from parity.mutants.mutant import Mutant

FAMILIES = (layers, constants, models, kinks, losses, optimizers, eight_bit, schedules, steps, attention)
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for family in FAMILIES for mutant in family.MUTANTS}
"""All mutants by name."""
