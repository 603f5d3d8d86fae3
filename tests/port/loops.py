"""Training scripts that are written for a test: one loop, with the parts that a test replaces."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.port.fed import check_fed
from jaxtrain.port.ported import Ported, ported
from jaxtrain.port.rerun import check_rerun
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from jaxtrain.port.write import write

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
{model}
{optimizer}
loader = DataLoader(TensorDataset(torch.randn(50, 6), torch.randint(3, (50,))), batch_size=8, shuffle=True)
criterion = nn.CrossEntropyLoss()
for epoch in range(100):
    model.train()
    for i, (x, y) in enumerate(loader):
        {forward}
        {backward}
        {step}
    {end}
"""
PARTS = {
    "model": "model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))",
    "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "forward": "loss = criterion(model(x), y)",
    "backward": "loss.backward()",
    "step": "optimizer.step(); optimizer.zero_grad()",
    "end": "pass",
}


def script(folder: Path, **parts: str) -> Path:
    """Write a script, with some parts in place of `PARTS`."""
    path = folder / "train.py"
    path.write_text(LOOP.format(**{**PARTS, **parts}))
    return path


def written_port(path: Path, updates: int, *, is_fed: bool = True) -> Ported:
    """Record a script, and write its port beside it.

    Args:
      path: The script.
      updates: Number of updates.
      is_fed: Whether the batches that the script gives are compared with those of the recording.
    """
    training = understood(record(path, [], updates))
    check_rerun(training)
    result = ported(training)
    write(result, path, [], path.parent)
    if is_fed and training.cut is not None:
        check_fed(training, path, [], path.parent)
    return result


@contextlib.contextmanager
def changed(file: Path, old: str, new: str) -> Iterator[None]:
    """Change a written file while entered."""
    text = file.read_text()
    run = next(path for folder in file.parents if (path := folder / "run.py").exists())
    assert old in text
    own = run.read_text()
    run.write_text(f"{own}# with another {file.name}\n")  # files are imported once for each content
    file.write_text((run.read_text() if file == run else text).replace(old, new))
    try:
        yield
    finally:
        run.write_text(own)
        file.write_text(text)


def line_of(path: Path, text: str) -> str:
    """Return the place of the first line with a text, as errors name it."""
    number = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return f"{path.name}:{number}"
