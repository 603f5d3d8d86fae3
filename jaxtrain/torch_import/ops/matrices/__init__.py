"""Products of matrices, and `torch.linalg`."""
