"""One process of `parity.distributed.processes.in_processes`: the function in one file, its result into another."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    asked, answer = map(Path, sys.argv[1:])
    result = pickle.loads(asked.read_bytes())()
    if result is not None:
        answer.write_bytes(pickle.dumps(result))
