"""Thousands of mutated files are read in a process with bounded memory; see `tests.fuzz.importers`."""

import json
import os
import subprocess
import sys

import pytest

from tests.fuzz.importers import KINDS

COUNT = int(os.environ.get("JAXTRAIN_FUZZ", "250"))
MODELS = {"model", "index", *(name for name in KINDS if name.endswith("config"))}
# Creating a model of each family takes longer than reading a hundred files.
QUICK = [name for name in KINDS if name not in MODELS - {"gpt2 config", "index"}]


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (COUNT // 2, QUICK),
        (COUNT, list(KINDS)),
        pytest.param(8 * COUNT, list(KINDS), marks=pytest.mark.nightly),
    ],
    ids=["some", "all", "many"],
)
def test_every_mutated_file_is_read_or_refused(count, names):
    command = [sys.executable, "-m", "tests.fuzz.importers", str(count), "0", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(outcomes.get("read", 0) + outcomes.get("refused", 0) for outcomes in result.values()) >= 0.9 * count
    for name, outcomes in result.items():
        assert outcomes.get("refused", 0) > 0, (name, outcomes)
    # Mutations that are all rejected would only exercise the first checks.
    assert sum("read" in outcomes for outcomes in result.values()) >= len(result) // 2
