"""Parity tests run PyTorch with one thread per worker: more would contend for the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
