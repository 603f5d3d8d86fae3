"""Names of jitted functions by which passes find in a program what another package or pass has put there."""

GATHERED_COPY = "gathered_copy"
"""Name of a jitted function of a parameter and its copy that returns the copy."""

DIVIDED_LOOKUP = "divided_lookup"
"""Name of a jitted function of a table and indices that looks up rows, and moves them between devices meanwhile."""
