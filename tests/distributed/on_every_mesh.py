"""Compare training on each mesh with training on one device, in a separate process with enough devices."""

import json
import sys

from jaxtrain.distributed import make_mesh
from tests.distributed.programs import PIPELINED, RUNS, distance, train


def main(name: str, specs: list[str]) -> None:
    """Print the largest distance of parameters, optimizer state and model state, by mesh.

    Each is given as "data=2,fsdp=4", with options of the step as "data=2,fsdp=4 gradient_sums=sharded". Those with a
    pipeline train four layers with four micro-batches.
    """
    is_pipelined = any("pipeline" in spec for spec in specs)
    run = (PIPELINED if is_pipelined else RUNS)[name]()
    shared = {"accumulate": 4} if is_pipelined else {}
    alone, _ = train(run, **shared)
    kept = (alone.params, alone.opt_state, alone.model_state)
    distances = {}
    for spec in specs:
        mesh, *given = spec.split()
        options = {name: int(x) if x.isdigit() else x for name, x in (option.split("=") for option in given)}
        state, _ = train(run, make_mesh(mesh), **shared, **options)
        distances[spec] = distance(kept, (state.params, state.opt_state, state.model_state))
    print(json.dumps(distances))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
