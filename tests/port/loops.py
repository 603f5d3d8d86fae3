"""Training scripts that are written for a test: one loop, with the parts that a test replaces."""

from pathlib import Path

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


def line_of(path: Path, text: str) -> str:
    """Return the place of the first line with a text, as errors name it."""
    number = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return f"{path.name}:{number}"
