"""Read and write models in Hugging Face layout: `config.json` and `model.safetensors`, in one file or in shards.

The configuration determines the tensors, and missing, unexpected or mis-shaped ones are refused before any is read.
Tensors are then read one by one, so that there are never two copies of the whole model.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxtrain.errors import UserError
from jaxtrain.fields import type_errors
from jaxtrain.interop import LAYER, NameTable, leaves, require_floating
from jaxtrain.models.files import expert_tensors
from jaxtrain.models.files.folder import CONFIG, read_json, read_tensors, resolve_folder, write_json, write_tensors
from jaxtrain.models.files.hf_config import report_unread_settings
from jaxtrain.models.files.stored_arrays import read_arrays
from jaxtrain.models.sequence_classifier import CLASSIFIERS, NewHead
from jaxtrain.records import Record


@dataclass(frozen=True)
class Family:
    """Implementation of a `model_type`.

    Attributes:
      module: Module of this package, or package whose module `config` defines the configuration.
      heads: Its class for each architecture of transformers; the first is the default.
      prefix: Prefix of the names in these architectures that the names of the bare model lack.
      skipped: Regular expression of other names in checkpoints: constants, and heads that only pretraining uses.
      read: Conversion of the tensors of a file to those of the model.
      write: Conversion of the tensors of the model to those of a file.
    """

    module: str
    heads: Mapping[str, str]
    prefix: str = ""
    skipped: str = ""
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    write: Callable[[Iterator[tuple[str, np.ndarray]]], Iterator[tuple[str, np.ndarray]]] = iter


def _decoder(architecture: str, module: str = "llama", head: str = "Llama") -> Family:
    return Family(module, {architecture: head}, "model.", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def _classifier(decoder: Family) -> Family:
    """Return the family of a decoder with the head of `SequenceClassifier` instead of that of a language model."""
    return replace(decoder, module="sequence_classifier", skipped=rf"{decoder.skipped}|lm_head\.weight")


FAMILIES = {
    "gpt2": Family("gpt2", {"GPT2LMHeadModel": "GPT2"}, "transformer.", r"h\.\d+\.attn\.(masked_)?bias"),
    "llama": _decoder("LlamaForCausalLM"),
    "mistral": _decoder("MistralForCausalLM"),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM"),
    "smollm3": _decoder("SmolLM3ForCausalLM"),
    "mixtral": replace(
        _decoder("MixtralForCausalLM", "mixtral", "Mixtral"),
        read=expert_tensors.stack_experts,
        write=expert_tensors.unstack_experts,
    ),
    "t5": Family(
        "t5",
        {"T5ForConditionalGeneration": "T5"},
        skipped=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    "bert": Family(
        "bert",
        {"BertForMaskedLM": "Bert", "BertForSequenceClassification": "Bert"},
        "bert.",
        r"embeddings\.position_ids|(pooler\.dense|cls\.seq_relationship)\.(weight|bias)",
    ),
    "vit": Family("vit", {"ViTForImageClassification": "ViT"}, "vit."),
    "resnet": Family("resnet", {"ResNetForImageClassification": "ResNet"}, "resnet."),
}
"""Families by `model_type`. Modules are imported on first use."""

_MODELS = "jaxtrain.models"
_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def from_pretrained(
    path: Path | str, *, dtype: Any | None = np.float32, shardings: Callable[[Any], Any] | None = None
) -> Any:
    """Load a model from a folder in Hugging Face layout or from the Hub.

    Args:
      path: Folder, or Hub id such as "openai-community/gpt2", of which `huggingface_hub` downloads the configuration
        and the safetensors only.
      dtype: Dtype of the floating parameters; None for the stored ones.
      shardings: Function of the shapes of the parameters that returns their shardings, such as
        `partial(jaxtrain.distributed.param_shardings, mesh=mesh, rules=llama.SHARDING)`. No device ever has a whole
        parameter that is sharded. None places all of them on the default device.

    Returns:
      An `nnx.Module`, whose `config` is that of its family. `functional` splits it into (apply, params),
      `functional_with_state` one with BatchNorm.

    Raises:
      UserError: There is no such folder, the model or one of its settings is not supported, or the tensors are not
        those of the configuration.

    Example:
      >>> import tempfile
      >>> from jaxtrain.models.functional import functional
      >>> from jaxtrain.models.t5 import T5, T5Config
      >>> config = T5Config(vocab_size=7, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_decoder_layers=1, num_heads=2)
      >>> _, params = functional(T5(config, rngs=nnx.Rngs(0)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_pretrained(folder, params, config)
      ...     model = from_pretrained(folder)
      >>> apply, params = functional(model)
      >>> apply(params, jnp.ones((1, 3), int), jnp.ones((1, 2), int)).shape, model.config == config
      ((1, 2, 7), True)
    """
    stored = _open(path, dtype)
    graphdef, *_ = nnx.split(stored.model, nnx.Param, nnx.BatchStat)
    if shardings is not None:
        stored.likes[0] = jax.tree.map(_with_sharding, stored.likes[0], shardings(stored.likes[0]))
    return nnx.merge(graphdef, *map(read_arrays, stored.arrays, stored.likes))


@dataclass(frozen=True, eq=False)
class PretrainedModel:
    """A model in a folder, whose weights are read by `params`.

    Attributes:
      model: The module, with shapes instead of arrays.
      names: Names of its parameters in the model of `transformers`.
      sharding: Sharding rules of its parameters, as of `jaxtrain.distributed.shard`.
      shapes: Shapes and dtypes of its parameters.
      stored: Its parameters as they are stored; slices of every axis read a part of one.
    """

    model: Any
    names: NameTable
    sharding: Mapping[str, PartitionSpec]
    shapes: Any
    stored: Any

    def params(self, like: Any = None) -> Any:
        """Read the parameters.

        Args:
          like: Their shapes with the dtypes and shardings to read them into, and with None for those that are not read;
            None for `shapes`, on the default device. Each process reads what its devices hold.
        """
        return read_arrays(self.stored, self.shapes if like is None else like)


def open_pretrained(path: Path | str, *, dtype: Any | None = None, new_head: NewHead | None = None) -> PretrainedModel:
    """Open a model without running statistics as `from_pretrained` does, without reading its weights.

    Args:
      path: As of `from_pretrained`.
      dtype: As of `from_pretrained`, by default the stored ones.
      new_head: Head of a classifier to put on a language model, instead of its own.

    Returns:
      The model.

    Raises:
      UserError: As `from_pretrained`.

    Example:
      >>> import tempfile
      >>> from jaxtrain.models.functional import functional
      >>> from jaxtrain.models.gpt2 import GPT2, GPT2Config
      >>> config = GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2)
      >>> _, params = functional(GPT2(config, rngs=nnx.Rngs(0)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_pretrained(folder, params, config)
      ...     opened = open_pretrained(folder)
      ...     opened.shapes["wte"].shape, bool((opened.params()["wte"] == params["wte"]).all())
      ((7, 4), True)
    """
    stored = _open(path, dtype, new_head)
    names, sharding = stored.module.torch_names(stored.config), stored.module.SHARDING
    return PretrainedModel(stored.model, names, sharding, stored.likes[0], stored.arrays[0])


class _Stored(NamedTuple):
    """A model in a folder: what it is, and its arrays, which are read later."""

    module: ModuleType
    config: Any
    model: Any
    likes: list[Any]
    arrays: list[Any]


def _open(path: Path | str, dtype: Any | None, new_head: NewHead | None = None) -> _Stored:
    if dtype is not None:
        _check_dtype(dtype)
    folder = resolve_folder(path)
    values = Record(read_json(folder, CONFIG))
    if new_head is not None:
        values = values | new_head.config_json(values)
    family, head = _family(values, folder)
    module = importlib.import_module(f"{_MODELS}.{family.module}")
    config, model = _shapes(module, head, values, folder)
    report_unread_settings(values, folder / CONFIG)
    _, *states = nnx.split(model, nnx.Param, nnx.BatchStat)
    likes = [nnx.to_pure_dict(state) for state in states]
    tables = _tables(module, config)
    head_tensors = {} if new_head is None else new_head.tensors(config)
    stored = family.read({**read_tensors(folder), **head_tensors})
    _check_depth(tables, likes, stored, folder)
    tensors = _rename(tables, likes, stored, family)
    buffers = {*tables[1].torch_order(likes[1])}
    parts = [
        {name: tensor for name, tensor in tensors.items() if name not in buffers},
        {name: tensor for name, tensor in tensors.items() if name in buffers},
    ]

    def typed(leaf: Any, array: Any) -> jax.ShapeDtypeStruct:
        wanted = array.dtype if dtype is None else np.dtype(dtype)
        if not all(jnp.issubdtype(x, np.floating) for x in (leaf.dtype, wanted)):
            wanted = leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(wanted))

    arrays = [table.stored(part, like) for table, part, like in zip(tables, parts, likes, strict=True)]
    require_floating(arrays[0], likes[0])
    likes = [jax.tree.map(typed, like, found) for like, found in zip(likes, arrays, strict=True)]
    return _Stored(module, config, model, likes, arrays)


def save_pretrained(
    folder: Path | str, params: Any, config: Any, *, model_state: Any = None, max_shard_size: int = 5 * 10**9
) -> None:
    """Write a model in the layout that `from_pretrained` and `transformers` read.

    Tensors keep their dtypes and bits; tied ones are written once.

    Args:
      folder: Folder; it is created if it does not exist.
      params: Parameters.
      config: Configuration of the model, of one of the families.
      model_state: Running statistics of a model with BatchNorm.
      max_shard_size: Largest size of a file, in bytes; larger models are written as several files with an index.

    Raises:
      UserError: The folder contains weights already, or cannot be written.
    """
    family = type(config).__module__.removeprefix(f"{_MODELS}.").partition(".")[0]
    module = importlib.import_module(f"{_MODELS}.{family}")
    trees = (params, {} if model_state is None else model_state)
    named = (pair for table, tree in zip(_tables(module, config), trees, strict=True) for pair in _named(table, tree))
    values = module.to_hf(config)
    write_tensors(Path(folder), _sharded(FAMILIES[values["model_type"]].write(named), max_shard_size))
    dtypes = {jnp.result_type(leaf).name for leaf in jax.tree.leaves(params)}
    write_json(Path(folder), CONFIG, {**values, **({"dtype": dtypes.pop()} if len(dtypes) == 1 else {})})


def _with_sharding(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _check_dtype(dtype: Any) -> None:
    if not jnp.issubdtype(dtype, np.floating):
        raise UserError(f"dtype must be float32, bfloat16, float16 or float64, got {np.dtype(dtype).name}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError("dtype float64 needs JAX's x64 mode: jax.config.update('jax_enable_x64', True)")


def _family(values: Mapping[str, Any], folder: Path) -> tuple[Family, str]:
    """Return the family of a configuration and the name of its class."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"model_type {model_type!r} of {folder} is not supported: use one of {', '.join(FAMILIES)}, or "
            "jaxtrain.from_torch(folder, example_batch), which imports the model of transformers"
        )
    family = FAMILIES[model_type]
    classifier = CLASSIFIERS.get(model_type)
    heads = [*family.heads] if classifier is None else [*family.heads, classifier]
    architectures = values.get("architectures") or heads[:1]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    # The weights of a bare model lack a head, which is not missing if it is tied to them.
    if isinstance(architecture, str) and architecture.endswith("Model") and architecture not in heads:
        architecture = heads[0]
    if architecture not in heads:
        raise UserError(f"architecture {architecture!r} of {folder} is not supported: only {', '.join(heads)}")
    if architecture == classifier:
        return _classifier(family), "build"
    return family, family.heads[architecture]


def _shapes(module: ModuleType, head: str, values: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """Return the configuration and the model without arrays, so that nothing is allocated for untrusted sizes."""
    from_hf, kind = module.from_hf, getattr(module, head)
    try:
        config = from_hf(values)
        if wrong := type_errors(config):
            raise TypeError(wrong[0])
        return config, nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{folder / CONFIG} is not a valid configuration ({why}): download it again") from error


def _tables(module: ModuleType, config: Any) -> tuple[NameTable, NameTable]:
    """Return the name tables, as in files, of the parameters and of the running statistics."""
    buffers = module.torch_buffers(config) if hasattr(module, "torch_buffers") else NameTable({})
    # The names in the model of transformers may be newer than those in its files.
    names = module.file_names if hasattr(module, "file_names") else module.torch_names
    return names(config), buffers


def _check_depth(tables: Any, likes: Any, tensors: Mapping[str, Any], folder: Path) -> None:
    """Compare the number of layers with the number of tensors, before names are created for every layer."""
    for table, like in zip(tables, likes, strict=True):
        for path, leaf in leaves(like):
            if LAYER in table.params[path].name and leaf.shape[0] > len(tensors):
                raise UserError(
                    f"{folder / CONFIG} has {leaf.shape[0]} layers, the weights {len(tensors)} tensors: "
                    "download both from the same source"
                )


def _rename(tables: Any, likes: Any, tensors: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return tensors under the names of the tables: prefixes of a bare model are added, skipped names left out."""
    known = {name for table, like in zip(tables, likes, strict=True) for name in table.torch_order(like)}
    known |= {alias for table in tables for alias in table.tied}
    found: dict[str, Any] = {}
    for stored, tensor in tensors.items():
        name = stored
        for old, new in _LEGACY.items():
            name = name.replace(old, new)
        if name not in known and family.prefix + name in known:
            name = family.prefix + name
        if name in found:
            raise UserError(f"{stored} and another tensor both mean {name}: remove one")
        if name in known or not re.fullmatch(family.skipped, name.removeprefix(family.prefix)):
            found[name] = tensor
    return found


def _named(table: NameTable, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors with their PyTorch names, leaf by leaf, so that one at a time is fetched from its device."""
    for path, leaf in leaves(tree):
        # PyTorch's counts are int64.
        array = np.asarray(leaf)
        wide = array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array
        yield from table.only([path]).to_torch({path: wide}).items()


def _sharded(named: Iterator[tuple[str, np.ndarray]], max_shard_size: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    for name, tensor in named:
        if shard and sum(x.nbytes for x in shard.values()) + tensor.nbytes > max_shard_size:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
