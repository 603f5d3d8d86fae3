"""Plant bugs one at a time, to see whether the harness finds them: `parity mutate FILE.py::FACTORY`.

The bugs are those of the operations of a user's imported module; the project's own tests plant others.
"""

from parity.mutate.mutant import Mutant, Patch, patched
from parity.mutate.planting import Outcome, clean_runs, document, main, mutants_in, outcomes

__all__ = ["Mutant", "Outcome", "Patch", "clean_runs", "document", "main", "mutants_in", "outcomes", "patched"]
