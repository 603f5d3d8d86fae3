"""Export of models to ONNX, StableHLO, Hugging Face folders and PyTorch checkpoints."""

__all__ = [
    "huggingface",
    "inference",
    "model_card",
    "onnx",
    "predict",
    "stablehlo",
    "torch_checkpoint",
    "transformers_logits",
    "verify",
]
