"""What exists for XLA:CPU alone."""

__all__ = ["host_memory", "products", "workspace"]
