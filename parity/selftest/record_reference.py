"""`python -m parity.selftest.record_reference`: run PyTorch's side of the selftest and write it to `gpt2.npz`."""

from pathlib import Path

import numpy as np

from parity.compare.reference import live_reference
from parity.selftest.gpt2_check import LOW, RECORDED, STEPS, case, distances, groups
from parity.settings import Settings


def record(path: Path) -> None:
    """Train in PyTorch in float64 and in each lower precision and write the arrays of the selftest."""
    settings = Settings(steps=STEPS)
    exact = live_reference(case(), "fp64", settings)
    truth = groups(exact.truth)
    arrays = {f"weights/{name}": x for name, x in exact.weights.items()}
    arrays |= {f"{what}/{name}": np.asarray(x, np.float64) for what, of in truth.items() for name, x in of.items()}
    for low in LOW:
        reference = live_reference(case(), low, settings)
        # The farthest of them measures the noise, as in parity run.
        runs = [reference.theirs, *reference.reordered]
        arrays[f"distances/{low}"] = np.max([distances(groups(run), truth) for run in runs], axis=0)
        arrays[f"scales/{low}"] = reference.theirs.scales
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # the stub types arrays like its flag


if __name__ == "__main__":
    record(RECORDED)
