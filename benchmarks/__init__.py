"""JAX beside PyTorch on the same work, in one run."""
