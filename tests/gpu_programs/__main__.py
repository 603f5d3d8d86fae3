"""`JAX_PLATFORMS=cpu python -m tests.gpu_programs [NAME …]`: record the figures of the programs."""

import json
import sys

import conftest  # noqa: F401  # the settings of the tests, which change programs
from tests.gpu_programs.families import program
from tests.gpu_programs.golden import GOLDEN, summary
from tests.gpu_programs.test_contract import PROGRAMS

for settings in PROGRAMS:
    if not sys.argv[1:] or settings.name in sys.argv[1:]:
        print(settings.name, flush=True)
        (GOLDEN / f"{settings.name}.json").write_text(json.dumps(summary(program(settings)), indent=2) + "\n")
