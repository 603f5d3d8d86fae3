"""A regression with batch normalization and Nesterov's momentum."""

import numpy as np
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


def batch(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((8, width)).astype(np.float32) for name, width in (("x", 5), ("y", 2))}
