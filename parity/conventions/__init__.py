"""Conventions in which JAX code differs from PyTorch, as tables: one line each."""
