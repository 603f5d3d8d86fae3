"""Rewrites and settings for XLA:CPU only."""

__all__ = ["host_memory", "products", "short_rows", "threads", "workspace"]
