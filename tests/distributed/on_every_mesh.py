"""Compare training on each mesh with training on one device, in a separate process with enough devices."""

import json
import sys
from functools import cache
from typing import Any

from jaxtrain.distributed import make_mesh
from tests.distributed.programs import PIPELINED, RUNS, distance, train


def main(name: str, specs: list[str]) -> None:
    """Print the largest distance of parameters, optimizer state and model state, by mesh.

    Each is given as "data=2,fsdp=4", with options of the step as "data=2,fsdp=4 accumulate=4 gradient_sums=sharded".
    The option platform chooses the program of another platform, which the CPU runs.
    Those with a pipeline train four layers with four micro-batches.
    """
    is_pipelined = any("pipeline" in spec for spec in specs)
    run = (PIPELINED if is_pipelined else RUNS)[name]()

    @cache
    def alone(accumulate: int) -> Any:
        state, _ = train(run, accumulate=accumulate)
        return state.params, state.opt_state, state.model_state

    distances = {}
    for spec in specs:
        mesh, *given = spec.split()
        options: dict[str, Any] = {"accumulate": 4 if is_pipelined else 2}
        options |= {name: int(x) if x.isdigit() else x for name, x in (option.split("=") for option in given)}
        state, _ = train(run, make_mesh(mesh), **options)
        expected = alone(options["accumulate"])
        distances[spec] = distance(expected, (state.params, state.opt_state, state.model_state))
    print(json.dumps(distances))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
