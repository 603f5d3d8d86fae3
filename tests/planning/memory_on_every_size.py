"""Memory per device of a state and a batch on each number of devices, as reported by the compiler."""

import json
import sys

from jaxtrain.distributed import memory_per_device
from tests.distributed.deep import TOKENS, deep

if __name__ == "__main__":
    print(json.dumps({n: memory_per_device(*deep(f"fsdp={n}", gradient_sums="sharded"), TOKENS) for n in sys.argv[1:]}))
