"""Entry point of `python -m benchmarks`."""

import sys

from parity.__main__ import main

if __name__ == "__main__":
    sys.exit(main("benchmarks"))
