"""One process of `parity.distributed.processes.in_processes`: read a function from a file, write its result to
another."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    request, response = map(Path, sys.argv[1:])
    result = pickle.loads(request.read_bytes())()
    if result is not None:
        response.write_bytes(pickle.dumps(result))
