"""What the machine is: its devices, and the versions of what computes on them."""

import shutil
import subprocess

import jax

from benchmarks.gpu_check.lines import emit
from parity.attestation import environment

QUERY = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory")


def nvidia_smi() -> dict[str, str]:
    """Return what NVIDIA's tool says of the first GPU; empty without the tool."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
    return dict(zip(QUERY, found.split(", "), strict=True))


def main() -> None:
    """Print the environment."""
    import torch

    emit(
        "environment",
        platform=jax.default_backend(),
        **{name: value for name, value in environment().items() if name != "platform"},
        torch_cuda=torch.version.cuda,
        torch_sees_gpu=torch.cuda.is_available(),
        cudnn=torch.backends.cudnn.version(),
        gpu=nvidia_smi(),
    )


if __name__ == "__main__":
    main()
