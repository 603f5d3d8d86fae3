"""Models in and out of folders in Hugging Face layout: `config.json` and `model.safetensors`, in one file or in shards.

The configuration says which tensors there are to be; all that is missing, unexpected or mis-shaped is refused, before
the first is read. Tensors are then read one by one, each put where it stays: there are never two copies of the whole.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.fields import type_errors
from jaxtrain.interop import LAYER, NameTable, leaves
from jaxtrain.models import experts
from jaxtrain.models.folder import CONFIG, folder_of, read_json, read_tensors, write_json, write_tensors


@dataclass(frozen=True)
class Family:
    """What a `model_type` is here.

    `module`, of this package; `heads`, its class for each of transformers' architectures, the first of which is meant
    where none is said; `prefix`, which names have within these and not in the bare model; `skipped`, a regular
    expression of the names that checkpoints have beside: constants, and heads that only pretraining used;
    `read` and `write`, of tensors that files keep otherwise than the model.
    """

    module: str
    heads: Mapping[str, str]
    prefix: str = ""
    skipped: str = ""
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    write: Callable[[Iterator[tuple[str, np.ndarray]]], Iterator[tuple[str, np.ndarray]]] = iter


def _decoder(architecture: str, module: str = "llama", head: str = "Llama") -> Family:
    return Family(module, {architecture: head}, "model.", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


FAMILIES = {
    "gpt2": Family("gpt2", {"GPT2LMHeadModel": "GPT2"}, "transformer.", r"h\.\d+\.attn\.(masked_)?bias"),
    "llama": _decoder("LlamaForCausalLM"),
    "mistral": _decoder("MistralForCausalLM"),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM"),
    "smollm3": _decoder("SmolLM3ForCausalLM"),
    "mixtral": replace(
        _decoder("MixtralForCausalLM", "mixtral", "Mixtral"), read=experts.together, write=experts.alone
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
"""By `model_type`. A family's module is imported when it is asked for."""

_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def from_pretrained(path: Path | str, *, dtype: Any = np.float32) -> Any:
    """The model in a folder, or of a Hugging Face Hub id such as "openai-community/gpt2", as an `nnx.Module`.

    `functional` makes (apply, params) of it, `functional_with_state` of one with BatchNorm; its `config` is the
    family's. Floating tensors come in `dtype`, whatever they are stored in. Of an id, `huggingface_hub` downloads the
    configuration and the safetensors, no more. Raises `UserError` for what is no such folder, for a model that is not
    here or would compute something else here, and where the tensors are not the model's.

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
    _check_dtype(dtype)
    folder = folder_of(path)
    said = read_json(folder, CONFIG)
    family, head = _family(said, folder)
    module = importlib.import_module(f"{__package__}.{family.module}")
    config, model = _shapes(module, head, said, folder)
    graphdef, *states = nnx.split(model, nnx.Param, nnx.BatchStat)
    likes = [nnx.to_pure_dict(state) for state in states]
    tables = _tables(module, config)
    stored = family.read(read_tensors(folder))
    _check_depth(tables, likes, stored, folder)
    tensors = _as_in(tables, likes, stored, family)

    def put(array: np.ndarray, leaf: Any) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, np.floating)
        return jnp.asarray(array.astype(dtype if floating else leaf.dtype, copy=False))

    buffers = {*tables[1].torch_order(likes[1])}
    parts = [
        {name: tensor for name, tensor in tensors.items() if name not in buffers},
        {name: tensor for name, tensor in tensors.items() if name in buffers},
    ]
    read = [table.to_jax(part, like, put) for table, part, like in zip(tables, parts, likes, strict=True)]
    return nnx.merge(graphdef, *read)


def save_pretrained(
    folder: Path | str, params: Any, config: Any, *, model_state: Any = None, max_shard_size: int = 5 * 10**9
) -> None:
    """Write `params`, of the model that `config` is of, so that `from_pretrained` and `transformers` read them.

    Tensors keep their dtypes and bits; tied ones are written once. `model_state` is that of a model with BatchNorm.
    Beyond `max_shard_size` bytes there are several files and an index, each written before the next is made. Raises
    `UserError` where the folder holds weights already, or cannot be written.
    """
    module = importlib.import_module(type(config).__module__)
    trees = (params, {} if model_state is None else model_state)
    named = (pair for table, tree in zip(_tables(module, config), trees, strict=True) for pair in _named(table, tree))
    said = module.to_hf(config)
    write_tensors(Path(folder), _sharded(FAMILIES[said["model_type"]].write(named), max_shard_size))
    dtypes = {jnp.result_type(leaf).name for leaf in jax.tree.leaves(params)}
    write_json(Path(folder), CONFIG, {**said, **({"dtype": dtypes.pop()} if len(dtypes) == 1 else {})})


def _check_dtype(dtype: Any) -> None:
    if not jnp.issubdtype(dtype, np.floating):
        raise UserError(f"dtype {np.dtype(dtype).name} holds no weights: choose float32, bfloat16, float16 or float64")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError("dtype float64 needs JAX's x64 mode: jax.config.update('jax_enable_x64', True)")


def _family(said: Mapping[str, Any], folder: Path) -> tuple[Family, str]:
    """The family that a configuration is of, and the class."""
    model_type = said.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"model_type {model_type!r} of {folder} is not here: choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    heads = [*family.heads]
    architectures = said.get("architectures") or heads[:1]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    # A bare model's weights lack a head; where that is tied to them, nothing is missing.
    if isinstance(architecture, str) and architecture.endswith("Model") and architecture not in heads:
        architecture = heads[0]
    if architecture not in heads:
        raise UserError(f"architecture {architecture!r} of {folder} is not here: {model_type} has {', '.join(heads)}")
    return family, family.heads[architecture]


def _shapes(module: ModuleType, head: str, said: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """The configuration, and the model without arrays: nothing is allocated, whatever is said."""
    from_hf, kind = module.from_hf, getattr(module, head)
    try:
        config = from_hf(said)
        if wrong := type_errors(config):
            raise TypeError(wrong[0])
        return config, nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{folder / CONFIG} makes no model ({why}): take it from its source again") from error


def _tables(module: ModuleType, config: Any) -> tuple[NameTable, NameTable]:
    """The names that files have of the parameters; and of the buffers, of which most families have none."""
    buffers = module.torch_buffers(config) if hasattr(module, "torch_buffers") else NameTable({})
    # Those in transformers' model may be newer than its files'.
    names = module.file_names if hasattr(module, "file_names") else module.torch_names
    return names(config), buffers


def _check_depth(tables: Any, likes: Any, tensors: Mapping[str, Any], folder: Path) -> None:
    """Before names are made for every layer."""
    for table, like in zip(tables, likes, strict=True):
        for path, leaf in leaves(like):
            if LAYER in table.params[path].name and leaf.shape[0] > len(tensors):
                raise UserError(
                    f"{folder / CONFIG} has {leaf.shape[0]} layers, the weights {len(tensors)} tensors: "
                    "take both from the same source"
                )


def _as_in(tables: Any, likes: Any, tensors: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The tensors under the names of the tables: those of a bare model prefixed, what is skipped left out."""
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
            raise UserError(f"{stored} and another tensor are both {name}: keep one")
        if name in known or not re.fullmatch(family.skipped, name.removeprefix(family.prefix)):
            found[name] = tensor
    return found


def _named(table: NameTable, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors by their PyTorch names, a leaf's before the next is fetched from its device."""
    for path, leaf in leaves(tree):
        # PyTorch counts in int64.
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
