"""Thousands of damaged and manipulated files, read in a process of bounded memory; see `tests.fuzz.importers`."""

import json
import os
import subprocess
import sys

import pytest

from tests.fuzz.importers import KINDS

COUNT = int(os.environ.get("JAXTRAIN_FUZZ", "500"))
MODELS = {"model", "index", *(name for name in KINDS if name.endswith("config"))}
# Creating a model of each family takes longer than reading a hundred files.
QUICK = [name for name in KINDS if name not in MODELS - {"gpt2 config", "index"}]


@pytest.mark.parametrize(
    ("count", "names"),
    [(COUNT, QUICK), pytest.param(4 * COUNT, list(KINDS), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_file_is_read_or_refused_whatever_is_in_it(count, names):
    command = [sys.executable, "-m", "tests.fuzz.importers", str(count), "0", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(ends.get("read", 0) + ends.get("refused", 0) for ends in result.values()) >= 0.9 * count
    for name, ends in result.items():
        assert ends.get("refused", 0) > 0, (name, ends)
    # Mutations that are all rejected would only exercise the first checks.
    assert sum("read" in ends for ends in result.values()) >= len(result) // 2
