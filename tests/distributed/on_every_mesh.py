"""Compare training on each mesh with training on one device, in a separate process with enough devices."""

import json
import sys

from jaxtrain.distributed import make_mesh
from tests.distributed.programs import RUNS, distance, train


def main(name: str, specs: list[str]) -> None:
    """Print the largest distance of parameters, optimizer state and model state, by mesh.

    Each is given as "data=2,fsdp=4", with options of the step as "data=2,fsdp=4 gradient_sums=sharded".
    """
    run = RUNS[name]()
    alone, _ = train(run)
    kept = (alone.params, alone.opt_state, alone.model_state)
    distances = {}
    for spec in specs:
        mesh, *options = spec.split()
        state, _ = train(run, make_mesh(mesh), **dict(option.split("=") for option in options))
        distances[spec] = distance(kept, (state.params, state.opt_state, state.model_state))
    print(json.dumps(distances))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
