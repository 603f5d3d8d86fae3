"""PyTorch's operations as functions of arrays, by their names there, as in `F.linear(x, weight, bias)`.

The source of an imported model calls them where JAX's own functions differ from PyTorch's in values, gradients or
subgradients. Arguments are PyTorch's, with a key `rng` for those that draw random numbers; `layer_norm` and `dropout`
are those of `jaxtrain.models`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.models.layers.dropout import dropout
from jaxtrain.models.layers.layer_norm import layer_norm
from jaxtrain.passes import autocast_disabled
from jaxtrain.torch_import import ops
from jaxtrain.torch_import.nested_gradients import gradients
from jaxtrain.torch_import.ops.int64 import int64_array
from jaxtrain.torch_import.ops.network.norm import batch_norm_with_statistics
from jaxtrain.torch_import.ops.table import TABLE


def batch_norm(
    params: dict[str, Any],
    buffers: dict[str, Any],
    x: Any,
    train: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, dict[str, Any]]:
    """`torch.nn.BatchNorm` with its new statistics, which are empty in evaluation mode.

    Args:
      params: Its `weight` and `bias`, if it has them.
      buffers: Its `running_mean`, `running_var` and `num_batches_tracked`.
      x: Input [batch, channels, …].
      train: Whether to normalize by the statistics of the batch.
      momentum: Weight of the batch in the new statistics.
      eps: Number added to the variance.
    """
    mean, var = buffers["running_mean"], buffers["running_var"]
    y, _, _, new_mean, new_var = batch_norm_with_statistics(
        x, params.get("weight"), params.get("bias"), mean, var, train, momentum, eps
    )
    if not train:
        return y, {}
    count = buffers["num_batches_tracked"] + 1
    return y, {"num_batches_tracked": count, "running_mean": new_mean, "running_var": new_var}


def load_buffers(path: Path) -> dict[str, Any]:
    """Return the arrays of a safetensors file by name: those of float64, which JAX would round, as arrays of NumPy.

    Args:
      path: The file.
    """
    from safetensors import safe_open
    from safetensors.flax import load_file

    with safe_open(path, framework="np") as file:
        names = [*file.keys()]
        wide = {name: file.get_tensor(name) for name in names if file.get_slice(name).get_dtype() == "F64"}
    return {**load_file(path), **wide}


def without_autocast(fn: Callable[[], Any]) -> Any:
    """Call a function with autocast disabled, as under `torch.autocast(enabled=False)`."""
    with autocast_disabled():
        return fn()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int64_array": int64_array,
    "batch_norm": batch_norm,
    "dropout": dropout,
    "gradients": gradients,
    "layer_norm": layer_norm,
    "without_autocast": without_autocast,
}
"""The functions of this module by name: their own, or that of PyTorch's overload."""


def _add(name: str, fn: Callable[..., Any]) -> None:
    FUNCTIONS.setdefault(name, fn)


for _module in ops.__all__:
    for _name, _fn in vars(getattr(ops, _module)).items():
        if _name[0] != "_" and any(_fn is known for known in TABLE.values()):
            _add(_name, _fn)
for _overload, _fn in TABLE.items():
    if all(_fn is not known for known in FUNCTIONS.values()):
        _, _packet, _kind = _overload.split(".")
        _add(_packet.strip("_") if _packet.strip("_") not in FUNCTIONS else f"{_packet.strip('_')}_{_kind}", _fn)
globals().update(FUNCTIONS)
