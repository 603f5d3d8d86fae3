"""A run's model for other programs: ONNX, StableHLO, a folder for `transformers`."""

__all__ = ["huggingface", "inference", "onnx", "stablehlo", "torch_run", "verify"]
