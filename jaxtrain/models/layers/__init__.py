"""Layers that several families share."""
