"""The hashes of Python's strings, on which the order of a set depends."""

import os


def with_hash_seed() -> dict[str, str]:
    """Return the environment of a process in which strings have the same hashes in every run."""
    return {"PYTHONHASHSEED": "0", **os.environ}
