"""Quantization as torchao computes it, on the CPU."""

import ast
import importlib.util
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

__all__ = ["Float8Linear", "Float8LinearConfig"]

FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def to_torch(x):
    """Return an array as a tensor of the same bits."""
    x = np.asarray(x)
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def bits(x):
    """Return 8-bit numbers, of JAX or PyTorch, as uint8."""
    return x.contiguous().view(torch.uint8).numpy() if isinstance(x, torch.Tensor) else np.asarray(x).view(np.uint8)


def quantized(x, dtype, axis, power_of_two):
    """Return (data, scale) of a tensor with one scale (axis None), or one for each row along an axis."""
    granularity = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
    settings = {"scaling_granularity": granularity, "axiswise_dim": axis}
    tensor = hp_tensor_to_float8_dynamic(
        to_torch(x), FORMATS[dtype], LinearMMConfig(), round_scales_to_power_of_2=power_of_two, **settings
    )
    return bits(tensor._data), tensor._scale.numpy()


def blockwise():
    """Return the functions in plain PyTorch of torchao's blockwise module, which as a whole needs Triton to import."""
    spec = importlib.util.find_spec("torchao.prototype.blockwise_fp8_training")
    source = ast.parse((Path(spec.submodule_search_locations[0]) / "kernels.py").read_text())
    plain = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name.startswith("torch_")]
    names = {"torch": torch, "Tuple": tuple, "EPS": 1e-12, "e4m3_dtype": torch.float8_e4m3fn}
    names["FP8_E4M3_DTYPES"] = {torch.float8_e4m3fn}
    exec(compile(ast.Module(plain, []), "kernels.py", "exec"), names)
    return names
