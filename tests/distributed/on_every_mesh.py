"""Compare training on each mesh with training on one device, in a separate process with enough devices."""

import json
import sys
from functools import cache
from typing import Any

from jaxtrain.distributed import make_mesh
from tests.distributed.programs import RUNS, distance, train


def main(name: str, specs: list[str]) -> None:
    """Print the largest distance of parameters, optimizer state and model state, by mesh.

    Each is given as "data=2,fsdp=4", with windows of two micro-batches; as "data=2,fsdp=4:4" with windows of four; as
    "data=2,fsdp=4:sharded" with sharded gradient sums.
    """
    run = RUNS[name]()

    @cache
    def alone(accumulate: int) -> Any:
        state, _ = train(run, accumulate=accumulate)
        return state.params, state.opt_state, state.model_state

    distances = {}
    for spec in specs:
        mesh, _, option = spec.partition(":")
        accumulate = int(option) if option.isdigit() else 2
        sums = option if option and not option.isdigit() else "whole"
        state, _ = train(run, make_mesh(mesh), accumulate=accumulate, gradient_sums=sums)
        distances[spec] = distance(alone(accumulate), (state.params, state.opt_state, state.model_state))
    print(json.dumps(distances))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
