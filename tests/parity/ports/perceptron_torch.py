"""A perceptron with a norm, label smoothing, clipping, AdamW and a schedule."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.fc2 = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc2(self.norm(functional.gelu(self.fc1(x))))


def loss(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 40], gamma=0.5)


def batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((8, 6)).astype(np.float32), "y": rng.integers(0, 4, 8)}
