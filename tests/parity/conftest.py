"""Two workers on two cores: PyTorch's own threads would wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
