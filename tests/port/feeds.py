"""Training scripts without a DataLoader, whose parts are drawn by a number."""

import random
from pathlib import Path

LOOP = """
import random
import numpy as np
import torch
from torch import nn

torch.manual_seed({seed})
np.random.seed({seed})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.rnn = nn.{cell}(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 7)

    def forward(self, x, hidden):
        y, hidden = self.rnn(self.embed(x), hidden)
        y = nn.functional.dropout(self.norm(y.flatten(0, 1)), {dropout}, self.training)
        return self.out(y), hidden


def start():
    zeros = next(model.parameters()).new_zeros(1, 3, 6)
    return {start}


def detached(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(map(detached, h))


data = torch.randint(7, (40, 3))
weights = torch.rand(7) + 0.5
model = Net()
optimizer = torch.optim.{optimizer}
hidden = start()
step = 0
for epoch in range(100):
    {begin}
    model.train()
    for i in range(0, 36, 4):
        {batch}
        {hidden}
        out, hidden = model(x, hidden){after}
        {loss}
        {backward}
        {update}
        step += 1
    model.eval()
    with torch.no_grad():
        print(epoch, float(model(data[:4], start())[0].mean()))
"""
OPTIMIZERS = ("SGD(model.parameters(), lr=0.1, momentum=0.9)", "AdamW(model.parameters(), lr=0.01)")
BATCHES = (
    "x, y = data[i : i + 4], data[i + 1 : i + 5].flatten()",
    "j = torch.randint(35, ()).item(); x, y = data[j : j + 4], data[j + 1 : j + 5].flatten()",
    "j = np.random.randint(35); x, y = (torch.from_numpy(data.numpy()[j + k : j + k + 4].copy()) for k in (0, 1));"
    " y = y.flatten()",
    "k = 4 if i < 32 else 3; x, y = data[i : i + k], data[i + 1 : i + k + 1].flatten()",
)
HIDDEN = ("hidden = detached(hidden)", "hidden = start()")
LOSSES = (
    "loss = nn.functional.cross_entropy(out, y)",
    "beta = min(1.0, 0.1 + step / 30)\n        loss = beta * nn.functional.cross_entropy(out, y, weights)",
    "noise = torch.randn_like(out); loss = nn.functional.cross_entropy(out + 0.1 * noise, y)",
    "mask = (torch.rand(y.shape) < 0.7).float()\n"
    "        loss = (nn.functional.cross_entropy(out, y, reduction='none') * mask).mean()",
)
RATE = "for group in optimizer.param_groups: group['lr'] = 0.1 / (1 + step)\n        "
UPDATES = (
    ("loss.backward()", "optimizer.step(); optimizer.zero_grad()"),
    ("loss.backward()", RATE + "optimizer.step(); optimizer.zero_grad()"),
    ("(loss / 2).backward()", "if step % 2: optimizer.step(); optimizer.zero_grad()"),
    (
        "(loss / 2).backward(); nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
        "if step % 2 or i == 32: optimizer.step(); optimizer.zero_grad()",
    ),
)


def feed(folder: Path, number: int) -> Path:
    """Write the script of a number."""
    draw = random.Random(number)
    cell = draw.choice(["LSTM", "GRU"])
    batch = draw.choice(BATCHES)
    backward, update = draw.choice(UPDATES[:2] if "else 3" in batch else UPDATES[:3])
    start, hidden, after = "(zeros, zeros)" if cell == "LSTM" else "zeros", draw.choice(HIDDEN), ""
    if draw.random() < 0.3:  # as of PyTorch's RNNs, a first state is None
        start, hidden, after = "None", "pass", f"; {hidden}"
        if "detached" in after and draw.random() < 0.5:
            hidden, after = f"if hidden is not None: {HIDDEN[0]}", ""
    path = folder / "train.py"
    path.write_text(
        LOOP.format(
            seed=number,
            cell=cell,
            dropout=draw.choice([0.0, 0.2]),
            start=start,
            optimizer=draw.choice(OPTIMIZERS),
            begin=draw.choice(["hidden = start()", "pass"]),
            batch=batch,
            hidden=hidden,
            after=after,
            loss=draw.choice(LOSSES),
            backward=backward,
            update=update,
        )
    )
    return path
