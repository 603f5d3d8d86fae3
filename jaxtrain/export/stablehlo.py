"""A JAX function as StableHLO, by `jax.export`: a folder that runs wherever JAX does, without this project.

`model.stablehlo` is the program, for any batch; `model.safetensors` the weights it is given: within a program there
could be 2 GiB of them, and the compiler would compute with them. `load.py` puts the two together.
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
"""Those that a program is lowered for."""

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
"""`load.py`."""

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
    """Write `fn(weights, *inputs)` as such a folder; sizes of the inputs may be `jax.export.symbolic_shape`s.

    Products of float32 are those of float32 on every platform. Raises `UserError` where the folder holds weights
    already or cannot be written, and where `flatbuffers`, of which JAX makes programs, is not installed.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError("flatbuffers is not installed: pip install 'jaxtrain[stablehlo]'")
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}
    with jax.default_matmul_precision("highest"):
        exported = jax.export.export(jax.jit(fn), platforms=PLATFORMS)(shapes, *inputs)
    write_tensors(folder, [{name: np.asarray(x) for name, x in weights.items()}])
    (folder / "model.stablehlo").write_bytes(exported.serialize())
    (folder / "load.py").write_text(LOADER)


def runs(folder: Path, batches: Sequence[Sequence[np.ndarray]]) -> Iterator[np.ndarray]:
    """The logits of each batch of inputs, by a process of its own that has `load.py` and not this project.

    Raises `RunFailed` where it ends in an error.
    """
    with tempfile.TemporaryDirectory() as place:
        given, found = Path(place) / "given.npz", Path(place) / "found.npz"
        arrays = {f"{i}_{j}": x for i, inputs in enumerate(batches) for j, x in enumerate(inputs)}
        np.savez(given, inputs=[len(inputs) for inputs in batches], **arrays)  # type: ignore[arg-type]
        # This process holds most of a GPU's memory already.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(folder.absolute())}
        done = subprocess.run(
            [sys.executable, "-c", _VERIFIER, str(given), str(found)],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise RunFailed(f"the exported program did not run ({said}): not written")
        with np.load(found) as logits:
            yield from (logits[str(i)] for i in range(len(batches)))
