"""The built-in cases, and the batches that they share."""
