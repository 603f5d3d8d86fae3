"""A run's model for other programs: ONNX, StableHLO, a folder for `transformers`."""
