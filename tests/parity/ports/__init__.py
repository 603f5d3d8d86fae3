"""Three trainings in PyTorch with ports as somebody else would write them, for `parity verify`."""
