"""Export of models to ONNX, StableHLO, Hugging Face folders and PyTorch checkpoints."""

__all__ = ["huggingface", "inference", "onnx", "predict", "stablehlo", "torch_run", "verify"]
