"""PyTorch's parameters in and out."""

from jaxtrain.interop.names import AS_IS, CONV, LINEAR, NameTable, TorchParam, linear_after_flatten

__all__ = ["AS_IS", "CONV", "LINEAR", "NameTable", "TorchParam", "linear_after_flatten"]
