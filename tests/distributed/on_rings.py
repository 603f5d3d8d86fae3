"""Compare training with ring attention with training on one device, in a separate process with enough devices."""

import json
import sys

from jaxtrain.distributed import make_mesh
from jaxtrain.models.attention import primitives
from tests.distributed import programs
from tests.distributed.programs import RUNS, distance, train


def main(name: str, specs: list[str]) -> None:
    """Print the largest distance of parameters and optimizer state, by mesh; one device stores all scores."""
    programs.TOKENS = 16  # two chunks for each device
    alone, _ = train(RUNS[name]())
    primitives.LONG = 0
    distances = {}
    for spec in specs:
        state, _ = train(RUNS[name](), make_mesh(spec))
        distances[spec] = distance((alone.params, alone.opt_state), (state.params, state.opt_state))
    print(json.dumps(distances))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
