"""The mutants by name, in families, each named by what is wrong with it."""

from parity.mutants import kinks, layers, losses, optimizers, schedules, steps
from parity.mutants.mutant import Mutant

FAMILIES = (layers, kinks, losses, optimizers, schedules, steps)
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for family in FAMILIES for mutant in family.MUTANTS}
"""Every bug that is planted."""
