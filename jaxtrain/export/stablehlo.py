"""Export of a JAX function to StableHLO with `jax.export`: a folder that JAX runs without this project.

The program is in `model.stablehlo`, the weights in `model.safetensors`, and `load.py` loads both. Weights within the
program would be limited to 2 GiB and subject to constant folding.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from jaxtrain.errors import RunFailed, UserError
from jaxtrain.models import write_tensors

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms that a program is lowered for."""

LOADER = '''"""logits(*inputs): the model beside this file. It needs jax, flatbuffers and safetensors."""

from pathlib import Path
import jax
from safetensors.flax import load_file

folder = Path(__file__).parent
weights = load_file(folder / "model.safetensors")
model = jax.jit(jax.export.deserialize((folder / "model.stablehlo").read_bytes()).call)


def logits(*inputs):
    return model(weights, *inputs)
'''
"""Content of `load.py`."""

_VERIFIER = """
import sys
import numpy as np
from load import logits
given = np.load(sys.argv[1])
batches = [[given[f"{i}_{j}"] for j in range(int(n))] for i, n in enumerate(given["inputs"])]
assert "jaxtrain" not in sys.modules
np.savez(sys.argv[2], **{str(i): logits(*inputs) for i, inputs in enumerate(batches)})
"""


def write_stablehlo(
    folder: Path, fn: Callable[..., Any], weights: Mapping[str, Any], inputs: Sequence[jax.ShapeDtypeStruct]
) -> None:
    """Export `fn(weights, *inputs)` to a folder.

    Products of float32 are computed in float32 on every platform.

    Args:
      folder: The folder to create.
      fn: The function.
      weights: Its weights by name.
      inputs: Shapes and dtypes of the inputs; sizes may be symbolic (`jax.export.symbolic_shape`).

    Raises:
      UserError: The folder already holds weights or cannot be written, or `flatbuffers` is not installed, which JAX
        needs to serialize programs.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError("flatbuffers is not installed: pip install 'jaxtrain[stablehlo]'")
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}
    with jax.default_matmul_precision("highest"):
        exported = jax.export.export(jax.jit(fn), platforms=PLATFORMS)(shapes, *inputs)
    write_tensors(folder, [{name: np.asarray(x) for name, x in weights.items()}])
    (folder / "model.stablehlo").write_bytes(exported.serialize())
    (folder / "load.py").write_text(LOADER)


def run_stablehlo(folder: Path, batches: Sequence[Sequence[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield the logits of each batch of inputs, computed in a separate process by `load.py`, without this project.

    Raises:
      RunFailed: The process failed.
    """
    with tempfile.TemporaryDirectory() as place:
        given, outputs = Path(place) / "given.npz", Path(place) / "outputs.npz"
        arrays = {f"{i}_{j}": x for i, inputs in enumerate(batches) for j, x in enumerate(inputs)}
        np.savez(given, inputs=[len(inputs) for inputs in batches], **arrays)  # type: ignore[arg-type]
        # This process has already allocated most of the GPU's memory.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(folder.absolute())}
        done = subprocess.run(
            [sys.executable, "-c", _VERIFIER, str(given), str(outputs)],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise RunFailed(f"the exported program failed ({reason}): not written")
        with np.load(outputs) as logits:
            yield from (logits[str(i)] for i in range(len(batches)))
