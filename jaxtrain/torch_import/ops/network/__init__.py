"""Operations of `torch.nn.functional`."""
