"""Export of models to ONNX, StableHLO, Hugging Face folders and PyTorch checkpoints."""

__all__ = ["huggingface", "inference", "onnx", "stablehlo", "torch_run", "verify"]
