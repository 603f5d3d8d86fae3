"""Training scripts with a teacher that follows its student, whose parts are drawn by a number."""

import random
from pathlib import Path

LOOP = """
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed({seed})
student = nn.Sequential(nn.Linear(6, 8), {norm}, nn.Tanh(), nn.Linear(8, 4))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    {start}
    p.requires_grad_(False)
head = nn.Linear(4, 4)
optimizer = torch.optim.{optimizer}([*student.parameters(), *head.parameters()], lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(48, 6)), batch_size=8, shuffle=True)
step = 0
for epoch in range(100):
    student.train(); teacher.{mode}()
    for i, (x,) in enumerate(loader):
        noise = 0.1 * torch.randn_like(x)
        {target}
        loss = (head(student(x)) - target).square().mean()
        (loss / {window}).backward()
        if i % {window} == {window} - 1:
            optimizer.step(); optimizer.zero_grad(); step += 1
            {follow}
"""
TARGETS = (
    "with torch.no_grad(): target = teacher(x + noise)",
    "target = teacher(x + noise).detach()",
)
FOLLOWS = (
    "with torch.no_grad():\n"
    "                for p, q in zip(student.parameters(), teacher.parameters()): q.mul_({m}).add_(p, alpha=1 - {m})",
    "for p, q in zip(student.parameters(), teacher.parameters()): q.data = {m} * q.data + (1 - {m}) * p.data",
    "for p, q in zip(student.parameters(), teacher.parameters()): q.data.mul_({m}).add_(p.data * (1 - {m}))",
    "for p, q in zip(student.parameters(), teacher.parameters()): q.data.copy_(q.data * {m} + p.data * (1.0 - {m}))",
    "with torch.no_grad():\n"
    "                for p, q in zip(student.parameters(), teacher.parameters()): q.lerp_(p, 1.0 - {m})\n"
    "                for p, q in zip(student.buffers(), teacher.buffers()): q.copy_(p)",
    "with torch.no_grad():\n"
    "                for p, q in zip(student.state_dict().values(), teacher.state_dict().values()):\n"
    "                    q.copy_({m} * q + (1 - {m}) * p if q.is_floating_point() else p)",
    "with torch.no_grad():\n"
    "                p, q = [*student.parameters()], [*teacher.parameters()]\n"
    "                torch._foreach_mul_(q, {m}); torch._foreach_add_(q, p, alpha=1 - {m})",
)


def teacher(folder: Path, number: int) -> Path:
    """Write the script of a number."""
    draw = random.Random(number)
    anneals = draw.random() < 0.3
    follow = FOLLOWS[number % len(FOLLOWS)].format(m="m" if anneals else "0.9")
    path = folder / "train.py"
    path.write_text(
        LOOP.format(
            seed=number,
            norm=draw.choice(["nn.BatchNorm1d(8)", "nn.LayerNorm(8)"]),
            start=draw.choice(["pass", "p.data.mul_(0.5)"]),
            optimizer=draw.choice(["SGD", "AdamW"]),
            mode=draw.choice(["train", "eval"]),
            target=draw.choice(TARGETS),
            window=draw.choice([1, 2]),
            follow=("m = 1 - 0.5 / (1 + step)\n            " if anneals else "") + follow,
        )
    )
    return path
