"""Precision: what is computed, stored and rounded in which dtype."""
