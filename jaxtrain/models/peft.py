"""Adapters in and out of the folders of `peft`: `adapter_config.json` and `adapter_model.safetensors`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.interop import AS_IS, LAYER, LINEAR, NameTable, TorchParam, leaves
from jaxtrain.models.folder import folder_of, read_json, read_tensors, write_json, write_tensors
from jaxtrain.models.lora import LoraConfig, nested

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# Each changes the numbers where it is set.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters",
    "trainable_token_indices", "layer_replication", "velora_config", "alora_invocation_tokens", "use_qalora",
    "monteclora_config", "use_bdlora", "arrow_config", "kasa_config",
)  # fmt: skip
# These begin with other weights of the model itself.
_MOVING_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


def torch_names(adapters: Any, names: NameTable) -> NameTable:
    """The names that `peft` has for `adapters` of a model whose own are `names`.

    >>> adapters = {"fc": {"a": jnp.zeros((4, 2)), "b": jnp.zeros((2, 3))}}
    >>> [*torch_names(adapters, NameTable({"fc": TorchParam("mlp.fc.weight", LINEAR)})).to_torch(adapters)]
    ['base_model.model.mlp.fc.lora_A.weight', 'base_model.model.mlp.fc.lora_B.weight']
    """
    table = {}
    for path, leaf in leaves(adapters):
        kernel, _, half = path.rpartition("/")
        if kernel not in names.params:
            raise UserError(f"the adapters of {kernel} fit no kernel: give them the names of the model they are of")
        of = names.params[kernel]
        if (LAYER in of.name) != (leaf.ndim == 3):
            raise UserError(f"the kernel {kernel} of {of.name} is no linear layer's [in, out]: peft cannot be given it")
        # Both halves are torch.nn.Linear; A's inputs are in the kernel's order. Conv1D alone keeps [in, out].
        table[path] = TorchParam(_half(of, half), of.layout if half == "a" and of.layout is not AS_IS else LINEAR)
    return NameTable(table)


def save_adapters(folder: Path | str, adapters: Any, config: LoraConfig, names: NameTable, *, base: str = "") -> None:
    """Write `adapters` so that `load_adapters` and `peft.PeftModel.from_pretrained` read them.

    `names` is the model's own (`torch_names(config)` of its family); `base` says where the model itself is, a folder
    or an id of the Hub. Raises `UserError` where the folder has adapters already.
    """
    table = torch_names(adapters, names)
    kernels = {path.rpartition("/")[0] for path in table.params}
    modules = sorted(names.params[kernel].name.removesuffix(".weight") for kernel in kernels)
    write_tensors(Path(folder), [table.to_torch(adapters)], WEIGHTS)
    said = {
        "peft_type": "LORA",
        "base_model_name_or_path": base or None,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "target_modules": "|".join(re.escape(module).replace(re.escape(LAYER), r"\d+") for module in modules),
        "fan_in_fan_out": any(names.params[kernel].layout is AS_IS for kernel in kernels),
        "bias": "none",
        "inference_mode": True,
    }
    write_json(Path(folder), CONFIG, said)


def load_adapters(path: Path | str, params: Any, names: NameTable) -> tuple[dict[str, Any], LoraConfig]:
    """The adapters in a folder, of the model of these `params` and `names`, and their configuration.

    Their dtypes are those of the kernels. Raises `UserError` for a kind of adapter that is not here, and where the
    tensors are not adapters of the model.
    """
    folder = folder_of(path)
    said = read_json(folder, CONFIG)
    _check_supported(said, folder)
    config = _config(said, folder)
    tensors = read_tensors(folder, WEIGHTS)
    found = {
        name: kernel
        for name, kernel in leaves(params)
        if re.sub(re.escape(LAYER), "0", _half(names.params[name], "a")) in tensors
    }
    like = nested(
        {
            name: {
                "a": jax.ShapeDtypeStruct((*kernel.shape[:-1], config.r), kernel.dtype),
                "b": jax.ShapeDtypeStruct((*kernel.shape[:-2], config.r, kernel.shape[-1]), kernel.dtype),
            }
            for name, kernel in found.items()
        }
    )
    table = torch_names(like, names)
    adapters = table.to_jax(tensors, like, put=lambda array, leaf: jnp.asarray(array.astype(leaf.dtype, copy=False)))
    return adapters, replace(config, targets="|".join(map(re.escape, found)))


def _half(kernel: TorchParam, half: str) -> str:
    """The tensor's name of "a" or "b"."""
    return f"{_PREFIX}{kernel.name.removesuffix('.weight')}.lora_{half.upper()}.weight"


def _check_supported(said: Mapping[str, Any], folder: Path) -> None:
    wrong = [key for key in _UNSUPPORTED if said.get(key)]
    wrong += [key for key, only in {"peft_type": "LORA", "bias": "none"}.items() if said.get(key, only) != only]
    if str(said.get("init_lora_weights")).startswith(_MOVING_THE_BASE):
        wrong.append("init_lora_weights")
    if wrong:
        listed = ", ".join(f"{key} {said[key]!r}" for key in wrong)
        raise UserError(f"{folder / CONFIG} has {listed}, which is not supported: merge the adapters in peft, and save")


def _config(said: Mapping[str, Any], folder: Path) -> LoraConfig:
    r, alpha, rate = said.get("r", 8), said.get("lora_alpha", 8), said.get("lora_dropout", 0.0)
    if not isinstance(r, int) or not all(isinstance(x, int | float) for x in (alpha, rate)):
        raise UserError(f"{folder / CONFIG} has r {r!r}, lora_alpha {alpha!r}, lora_dropout {rate!r}: they are numbers")
    return LoraConfig("", r, float(alpha), float(rate), bool(said.get("use_rslora")))
