"""Rewrites and settings for XLA:CPU only."""

__all__ = ["host_memory", "products", "program_log", "short_rows", "threads", "workspace"]
