"""Tables of the conventions in which JAX code may differ from PyTorch."""
