"""jaxtrain works without torch, and `import jaxtrain` imports no heavy packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtrain

SOURCES = sorted(Path(jaxtrain.__file__).parent.rglob("*.py"))

TRAINS_WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, NoTorch())

import jaxtrain as jt
heavy = {"grain", "tensorboardX", "orbax", "sklearn", "torch", "matplotlib", "PIL"} & set(sys.modules)
assert not heavy, f"import jaxtrain imports {heavy}"

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtrain import interop
from jaxtrain.models import MLP, functional

apply, params = functional(MLP((3, 4, 2), rngs=nnx.Rngs(0)))

def loss_fn(params, batch, rng):
    return jt.Loss(((apply(params, batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"])), {}

step = jt.train_step(loss_fn, optax.adamw(0.05), precision="bf16", accumulate=2, clip_norm=1.0, remat="full")
state = step.init(params)
batch = {"x": np.eye(4, 3, dtype=np.float32), "y": np.ones((4, 2), np.float32)}
losses = []
for _ in range(5):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
assert losses[-1] < losses[0], losses
assert "torch" not in sys.modules
print("trained")
"""


def test_training_runs_without_torch():
    result = subprocess.run([sys.executable, "-c", TRAINS_WITHOUT_TORCH], capture_output=True, text=True, timeout=300)
    assert result.stdout == "trained\n", result.stderr


IMPORTS = ("import_module", "__import__")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(SOURCES[0].parent).as_posix())
def test_no_module_imports_torch(source):
    is_of_scripts = source.match("port/*.py") and source.name not in ("__init__.py", "data.py")
    if "capture" in source.parts or source.name == "torch_internals.py" or is_of_scripts:
        pytest.skip("captures PyTorch's modules and scripts, and is imported when one is captured")
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if source.match("interop/torch_file.py") and getattr(node, "col_offset", 0):
            continue  # reads PyTorch's files, and imports torch inside its functions
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTS:
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        if source.match("cli/port.py"):  # when it proves a script
            names = [name for name in names if name != "parity.ported"]
        assert not {"torch", "parity"} & {str(name).split(".")[0] for name in names}, f"line {node.lineno}"
