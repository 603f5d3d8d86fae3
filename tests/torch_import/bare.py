"""Bare modules with an example batch, as a user's file defines them."""

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """Layers in a loop with a state, dropout, a frozen parameter, a random table, a mask; no loss."""

    def __init__(self):
        super().__init__()
        self.norms, self.head = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2)), nn.Linear(8, 3)
        self.fixed = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("table", torch.randn(8))

    def forward(self, x, mask):
        hidden = nn.functional.dropout(x + self.fixed, 0.2, self.training)
        for norm in self.norms:
            hidden = nn.functional.gelu(norm(hidden))
        return self.head(hidden.masked_fill(mask, 0.0) * self.table)


class Recurrent(nn.Module):
    """Arrays without a common first axis, in a tuple."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(7, 4), nn.LSTM(4, 5)

    def forward(self, ids, hidden):
        return self.cell(self.embedding(ids), (hidden, hidden))


class WithLoss(nn.Module):
    """A loss of its own, with labels to ignore."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x, labels):
        logits = self.fc(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


class Sized(nn.Module):
    def forward(self, x):
        return x[: int(x.sum() * 1000)]


def net():
    return Net(), {"x": torch.randn(6, 8), "mask": torch.rand(6, 8) > 0.8}


def recurrent():
    return Recurrent(), (torch.randint(0, 7, (6, 2)), torch.zeros(1, 2, 5))


def with_loss():
    return WithLoss(), {"x": torch.randn(4, 3), "labels": torch.tensor([0, 3, -100, 1])}


def linear():
    return nn.Linear(3, 2), np.ones((4, 3), np.float32)


def sized():
    return Sized(), np.ones(3, np.float32)
