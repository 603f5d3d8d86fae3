"""Read and write the adapter folders of `peft`: `adapter_config.json` and `adapter_model.safetensors`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.interop import AS_IS, LAYER, LINEAR, OUT_IN, Layout, NameTable, TorchParam, leaves
from jaxtrain.models import lora
from jaxtrain.models.files.folder import read_json, read_tensors, resolve_folder, write_json, write_tensors
from jaxtrain.models.lora import LoraConfig
from jaxtrain.records import Record, disregard, report_unread, unread_fields

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _BASE_LAYER = "base_model.model.", ".base_layer."

# Settings that change the result when set.
_UNSUPPORTED = (
    "lora_bias", "rank_pattern", "alpha_pattern", "target_parameters",
    "trainable_token_indices", "layer_replication", "velora_config", "alora_invocation_tokens", "use_qalora",
    "monteclora_config", "use_bdlora", "arrow_config", "kasa_config",
)  # fmt: skip
# Settings of the file, of training, or that the names of the tensors tell.
_IN_TENSORS = (
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "runtime_config", "qalora_group_size", "ensure_weight_tying", "init_lora_weights"),
)
# Initializations that change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


def torch_names(adapters: Any, names: NameTable) -> NameTable:
    """Return the name table of adapters in `peft`.

    Args:
      adapters: Adapters, as `jaxtrain.models.lora.init` creates them.
      names: Name table of the base model.

    Raises:
      UserError: An adapter matches no kernel of the model, or its kernel is not [in, out].

    Example:
      >>> adapters = {"fc": {"a": jnp.zeros((4, 2)), "b": jnp.zeros((2, 3))}}
      >>> [*torch_names(adapters, NameTable({"fc": TorchParam("mlp.fc.weight", LINEAR)})).to_torch(adapters)]
      ['base_model.model.mlp.fc.lora_A.weight', 'base_model.model.mlp.fc.lora_B.weight']
    """
    table = {}
    for path, leaf in leaves(adapters):
        if path in names.params:
            table[path] = _trained(path, adapters, names)
            continue
        kernel, _, part = path.rpartition("/")
        if kernel not in names.params:
            raise UserError(f"the adapters of {kernel} match no kernel: use the names of their own model")
        of = names.params[kernel]
        if (LAYER in of.name) != (leaf.ndim == (2 if part == "m" else 3)):
            raise UserError(f"the kernel {kernel} of {of.name} is not [in, out]: peft has no adapters for it")
        table[path] = TorchParam(_part(of, part), _layout(of, part), of.layers)
    return NameTable(table)


def save_adapters(
    folder: Path | str,
    adapters: Any,
    config: LoraConfig,
    names: NameTable,
    *,
    base: str = "",
    task_type: str | None = None,
) -> None:
    """Write adapters in the layout that `load_adapters` and `peft.PeftModel.from_pretrained` read.

    Args:
      folder: Folder to write to; it is created if it does not exist.
      adapters: Adapters, as `jaxtrain.models.lora.init` creates them.
      config: Their configuration.
      names: Name table of the base model, `torch_names(config)` of its family.
      base: Folder or Hub id of the base model.
      task_type: That of `peft`, "CAUSAL_LM" or "SEQ_CLS", for its `AutoPeftModelFor…`.

    Raises:
      UserError: The folder contains adapters already, or cannot be written; or the parameters that are trained
        themselves are neither whole modules nor biases.
    """
    table = torch_names(adapters, names)
    kernels = _adapted(adapters)
    trained = _trained_settings({*table.params} & {*names.params}, kernels, names)
    write_tensors(Path(folder), [table.to_torch(adapters)], WEIGHTS)
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": base or None,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": "|".join(sorted(_module_pattern(names.params[kernel]) for kernel in kernels)),
        "fan_in_fan_out": any(names.params[kernel].layout is AS_IS for kernel in kernels),
        "inference_mode": True,
        "task_type": task_type,
        **trained,
    }
    write_json(Path(folder), CONFIG, values)


def load_adapters(path: Path | str, params: Any, names: NameTable) -> tuple[dict[str, Any], LoraConfig]:
    """Read adapters from a folder or from the Hub, with `modules_to_save` and trained biases if it has any.

    Args:
      path: Folder, or Hub id "org/name".
      params: Parameters of the base model; only shapes and dtypes are used.
      names: Name table of the base model.

    Returns:
      A tuple (adapters in the dtypes of their kernels, configuration).

    Raises:
      UserError: The kind of adapter is not supported, or the tensors are not adapters of this model.
    """
    folder = resolve_folder(path)
    values = Record(read_json(folder, CONFIG))
    _check_supported(values, folder)
    config = _config(values, folder)
    disregard(values, *_IN_TENSORS)
    report_unread(folder / CONFIG, unread_fields(values))
    # Older versions do not name the biases of adapted modules so.
    tensors = {name.replace(_BASE_LAYER, "."): tensor for name, tensor in read_tensors(folder, WEIGHTS).items()}
    first = {path: replace(param, name=param.names(1)[0]) for path, param in names.params.items()}
    adapted = [path for path in first if _part(first[path], "a") in tensors]
    trained = [path for path in first if _PREFIX + first[path].name in tensors]
    _check_untied(trained, names, folder)
    config = replace(
        config,
        targets="|".join(map(re.escape, adapted)),
        trained="|".join(map(re.escape, trained)),
        out_in="|".join(re.escape(name) for name in adapted if names.params[name].layout is OUT_IN),
    )
    like = jax.eval_shape(lambda: lora.init(jax.random.key(0), params, config)) if adapted else {}
    named = torch_names(like, names).params.items()
    table = NameTable({path: replace(param, name=param.name.replace(_BASE_LAYER, ".")) for path, param in named})
    adapters = table.to_jax(tensors, like, put=lambda array, leaf: jnp.asarray(array.astype(leaf.dtype, copy=False)))
    return adapters, config


def _adapted(adapters: Any) -> set[str]:
    """Return the paths of the kernels that have adapters."""
    return {path.removesuffix("/a") for path, _ in leaves(adapters) if path.endswith("/a")}


def _module(param: TorchParam) -> tuple[str, str]:
    """Return the module of a parameter and its name there."""
    module, _, name = param.name.rpartition(".")
    return module, name


def _trained(path: str, adapters: Any, names: NameTable) -> TorchParam:
    """Return the tensor of a parameter that is trained itself."""
    module, name = _module(names.params[path])
    is_adapted = any(_module(names.params[kernel])[0] == module for kernel in _adapted(adapters))
    return replace(names.params[path], name=f"{_PREFIX}{module}{_BASE_LAYER if is_adapted else '.'}{name}")


def _trained_settings(trained: set[str], kernels: set[str], names: NameTable) -> dict[str, Any]:
    """Return the settings for parameters that are trained themselves: all biases, those of adapted modules, modules."""
    modules = {path: _module(param)[0] for path, param in names.params.items()}
    biases = {path for path, param in names.params.items() if _module(param)[1] == "bias"}
    of_adapted = {path for path in biases if modules[path] in {modules[kernel] for kernel in kernels}}
    modes = {"all": biases, "lora_only": of_adapted}
    bias = next((mode for mode, own in modes.items() if own and own <= trained), "none")
    saved = {modules[path] for path in trained - modes.get(bias, set())}
    if parts := sorted(path for path in set(modules) - trained if modules[path] in saved):
        raise UserError(f"{', '.join(parts)} must be trained too: peft saves whole modules, or biases")
    # peft compares the ends of names.
    return {"bias": bias, "modules_to_save": sorted({name.rpartition(LAYER)[2] for name in saved}) or None}


def _check_untied(trained: Sequence[str], names: NameTable, folder: Path) -> None:
    for path in trained:
        if (name := names.params[path].name) in names.tied.values():
            raise UserError(f"{folder / CONFIG} trains {name} apart from what is tied to it: merge it in peft")


def _module_pattern(kernel: TorchParam) -> str:
    """Return the regular expression of the modules of a kernel."""
    layers = r"\d+" if kernel.layers is None else f"({'|'.join(map(str, kernel.layers))})"
    return re.escape(kernel.name.removesuffix(".weight")).replace(re.escape(LAYER), layers)


def _part(kernel: TorchParam, part: str) -> str:
    """Return the name of the tensor of A, B or the norms."""
    name = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector"}[part]
    return f"{_PREFIX}{kernel.name.removesuffix('.weight')}.{name}"


def _layout(kernel: TorchParam, part: str) -> Layout:
    """Return the layout of A, B or the norms.

    A and B are torch.nn.Linear, the inputs of A in the order of the kernel's. Only Conv1D stores [in, out].
    """
    if part == "m":
        return AS_IS
    return kernel.layout if part == "a" and kernel.layout not in (AS_IS, OUT_IN) else LINEAR


def _check_supported(values: Mapping[str, Any], folder: Path) -> None:
    wrong = [key for key in _UNSUPPORTED if values.get(key)]
    wrong += ["peft_type"] if values.get("peft_type", "LORA") != "LORA" else []
    if str(values.get("init_lora_weights")).startswith(_CHANGES_BASE):
        wrong.append("init_lora_weights")
    if wrong:
        listed = ", ".join(f"{key} {values[key]!r}" for key in wrong)
        raise UserError(
            f"{folder / CONFIG} has {listed}, which is not supported: merge them in peft and save the model"
        )


def _config(values: Mapping[str, Any], folder: Path) -> LoraConfig:
    r, alpha, rate = values.get("r", 8), values.get("lora_alpha", 8), values.get("lora_dropout", 0.0)
    if not isinstance(r, int) or not all(isinstance(x, int | float) for x in (alpha, rate)):
        raise UserError(
            f"{folder / CONFIG} has r {r!r}, lora_alpha {alpha!r}, lora_dropout {rate!r}, which must be numbers"
        )
    return LoraConfig("", r, float(alpha), float(rate), bool(values.get("use_rslora")), bool(values.get("use_dora")))
