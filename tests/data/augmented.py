"""A dataset of PyTorch with random transforms, in a module that worker processes import quickly."""

import random

import numpy as np
import torch


class Augmented(torch.utils.data.Dataset):
    """Examples that depend on all global random generators."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": index, "noise": torch.rand(()) + random.random() + np.random.rand()}
