"""The logits of an exported decoder in `transformers`, with adapters in `peft`, computed in a process of its own."""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.errors import RunFailed

_PROGRAM = """
import sys
import numpy as np, torch, transformers
model, adapters, given, outputs = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
if adapters:
    import peft
    model = peft.PeftModel.from_pretrained(model, adapters)
with torch.no_grad(), np.load(given) as batches:
    logits = {name: model.eval()(torch.tensor(batches[name])).logits.numpy() for name in batches.files}
np.savez(outputs, **logits)
"""


def missing_packages(*, adapters: bool) -> list[str]:
    """Return the packages that `transformers_logits` needs and that are not installed."""
    needed = ["torch", "transformers", *(["peft"] if adapters else [])]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def transformers_logits(model: Path, adapters: Path | None, batches: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the logits of each batch of tokens, in float32.

    Args:
      model: Folder of a decoder.
      adapters: Folder of adapters for it; None for none.
      batches: Tokens int [B, T] of each batch.

    Raises:
      RunFailed: The model cannot be loaded, or the process failed.
    """
    with tempfile.TemporaryDirectory() as place:
        given, outputs = Path(place) / "given.npz", Path(place) / "outputs.npz"
        arrays = {str(i): np.asarray(tokens, np.int64) for i, tokens in enumerate(batches)}
        np.savez(given, **arrays)  # type: ignore[arg-type]
        folders = [str(model.absolute()), "" if adapters is None else str(adapters.absolute())]
        command = [sys.executable, "-c", _PROGRAM, *folders, str(given), str(outputs)]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise RunFailed(f"transformers cannot compute with the export ({reason}): not written")
        with np.load(outputs) as logits:
            yield from (logits[str(i)] for i in range(len(batches)))
