"""Checks run where only the frameworks are installed."""

import subprocess
import sys

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"grain", "tensorboardX", "jax2onnx", "equinox"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
from parity.cli import main
sys.exit(main(["run", "mlp", "--precision", "fp64", "--steps", "2"]))
"""


def test_a_check_needs_only_the_frameworks_and_rich() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "held" in done.stdout
