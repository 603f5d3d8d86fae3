"""Compare training with ring attention with training on one device, in a separate process with enough devices."""

import json
import sys
from functools import partial

from jaxtrain.distributed import make_mesh
from jaxtrain.models import mixtral
from jaxtrain.models.attention import primitives
from tests.distributed import programs
from tests.distributed.programs import RUNS, SEQUENCES, distance, llama_run, packed_run, train

WINDOW = {"model_type": "mistral", "sliding_window": 5}
MIXED = {"model_type": "qwen3", "sliding_window": 5, "layer_types": ("sliding_attention", "full_attention")}
RINGS = {
    **{name: RUNS[name] for name in (*SEQUENCES, "mixtral")},
    "window": partial(llama_run, **WINDOW),
    "mixed": partial(llama_run, **MIXED),
    "packed-window": partial(packed_run, **WINDOW),
    "packed-mixed": partial(packed_run, **MIXED),
    "packed-mixtral": partial(packed_run, mixtral, mixtral.Mixtral, mixtral.MixtralConfig, num_local_experts=4),
    "packed-dots": packed_run,
}
"""Runs whose attention is computed in a ring."""


def main(name: str, specs: list[str]) -> None:
    """Print the largest distance of parameters and optimizer state, by mesh; one device stores all scores."""
    programs.TOKENS = 32  # two chunks for each device, of two tokens each
    alone, _ = train(RINGS[name]())
    primitives.LONG = 0
    distances, options = {}, {"remat": "dots"} if name.endswith("dots") else {}
    for spec in specs:
        state, _ = train(RINGS[name](), make_mesh(spec), **options)
        distances[spec] = distance((alone.params, alone.opt_state), (state.params, state.opt_state))
    print(json.dumps(distances))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
