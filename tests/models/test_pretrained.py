"""Hugging Face folders are read and written to the bit as by transformers; invalid and malicious ones are refused."""

import json
import sys
import types
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, param_shardings
from jaxtrain.interop import (
    AS_IS,
    CONV,
    LINEAR,
    StoredLeaf,
    StoredTensor,
    TorchParam,
    linear_from_heads,
    linear_to_heads,
    read_torch,
)
from jaxtrain.models import (
    folder_digest,
    from_pretrained,
    functional,
    functional_with_state,
    open_pretrained,
    save_pretrained,
)
from jaxtrain.models.files import pretrained
from jaxtrain.models.mixtral import EXPERTS
from jaxtrain.models.t5 import T5, T5Config, to_hf
from parity.oracle.in_torch import InFloat64

TOKENS = np.random.default_rng(0).integers(2, 30, size=(2, 7))
IMAGES = np.random.default_rng(0).normal(size=(2, 32, 32, 3))
DECODER = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip
BERT = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 8,
}  # fmt: skip
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 31, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": False}),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", {
        **DECODER, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 3, "attention_bias": True,
    }),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 3, "experts_implementation": "eager"}),
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
    }),
    "bert": ("BertForMaskedLM", BERT),
    "bert-classifier": ("BertForSequenceClassification", {**BERT, "num_labels": 3}),
    "vit": ("ViTForImageClassification", {
        "image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_labels": 3,
    }),
    "resnet": ("ResNetForImageClassification", {
        "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 3,
    }),
}  # fmt: skip


def made_by_transformers(family, folder):
    architecture, sizes = FAMILIES[family]
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes)).eval()
    with torch.no_grad():
        # Norms and running statistics as after training.
        for name, tensor in model.state_dict().items():
            tensor.add_(3 if "num_batches" in name else 0.1 * torch.rand_like(tensor))
    model.save_pretrained(folder)
    return model


def their_logits(family, model):
    model = model.double().eval()
    with torch.no_grad(), InFloat64():
        if family in ("vit", "resnet"):
            return model(torch.tensor(IMAGES).permute(0, 3, 1, 2)).logits.numpy()
        tokens = torch.tensor(TOKENS)
        extra = {"decoder_input_ids": tokens[:, :4]} if family == "t5" else {}
        return model(tokens, **extra).logits.numpy()


def our_logits(family, model):
    if family == "resnet":
        apply, params, state = functional_with_state(model)
        return jax.jit(lambda params, state, x: apply(params, state, x)[0])(params, state, IMAGES)
    apply, params = functional(model)
    inputs = {"t5": (TOKENS, TOKENS[:, :4]), "vit": (IMAGES,)}.get(family, (TOKENS,))
    return jax.jit(apply)(params, *inputs)


def saved(model, folder, **options):
    _, params, *state = nnx.split(model, nnx.Param, nnx.BatchStat)
    save_pretrained(folder, nnx.to_pure_dict(params), model.config, model_state=nnx.to_pure_dict(state[0]), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_read_and_written_as_transformers_does(family, tmp_path):
    theirs = made_by_transformers(family, tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    saved(model, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype, name
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = from_pretrained(tmp_path / "ours", dtype=np.float64)
        assert wide.config == model.config
        ours = our_logits(family, wide)
    expected = their_logits(family, theirs)
    options = {"experts_implementation": "eager"} if family == "mixtral" else {}
    again = their_logits(family, type(theirs).from_pretrained(tmp_path / "ours", **options))
    np.testing.assert_array_equal(again, expected)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert ours.dtype == np.float64


CONFIG = T5Config(vocab_size=31, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=2, num_heads=2)


def t5():
    return T5(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture
def folder(tmp_path):
    saved(t5(), tmp_path / "model")
    return tmp_path / "model"


def alter(folder, **tensors):
    """Replace tensors in the folder, or remove those given as None."""
    path = folder / "model.safetensors"
    kept = {name: x for name, x in {**load_file(path), **tensors}.items() if x is not None}
    save_file(kept, path, metadata={"format": "pt"})


def alter_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def refused(folder):
    with pytest.raises(jt.UserError) as error:
        from_pretrained(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, functional(a)[1], functional(b)[1])


def test_shards_are_written_and_read(tmp_path):
    saved(t5(), tmp_path, max_shard_size=2000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert all(sum(x.nbytes for x in load_file(tmp_path / shard).values()) <= 2000 for shard in shards)
    equal(from_pretrained(tmp_path), t5())
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    np.testing.assert_array_equal(theirs["shared.weight"].numpy(), t5().shared[...])


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_low_precision_is_read_exactly_into_the_dtype_asked_for(folder, stored):
    path = folder / "model.safetensors"
    low = {name: x.astype(stored) for name, x in load_file(path).items()}
    save_file(low, path, metadata={"format": "pt"})
    assert {leaf.dtype for leaf in jax.tree.leaves(open_pretrained(folder).shapes)} == {np.dtype(stored)}
    for dtype in (np.float32, None):
        model = from_pretrained(folder, dtype=dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(functional(model)[1])} == {np.dtype(dtype or stored)}
        shared = np.asarray(model.shared[...])
        np.testing.assert_array_equal(shared.astype(np.float32), low["shared.weight"].astype(np.float32))
    saved(model, folder.parent / "again")
    again = load_file(folder.parent / "again" / "model.safetensors")
    assert all(again[name].tobytes() == low[name].tobytes() for name in low)
    assert json.loads((folder.parent / "again" / "config.json").read_text())["dtype"] == np.dtype(stored).name


class Counted:
    """A tensor that counts the bytes that are read of it."""

    def __init__(self, array, reads):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, reads

    def __getitem__(self, index):
        self.reads.append(self.array[index].nbytes)
        return self.array[index]

    def __array__(self, dtype=None, copy=None):
        return self[...]


@pytest.mark.parametrize(("family", "mesh"), [("llama", "data=2,fsdp=2"), ("mixtral", "fsdp=2,tensor=2")])
def test_every_part_is_read_once_into_the_shards_of_a_mesh(family, mesh, tmp_path, monkeypatch):
    made_by_transformers(family, tmp_path)
    reads = []
    read_tensors = pretrained.read_tensors

    def counted(folder):
        return {name: Counted(np.asarray(x), reads) for name, x in read_tensors(folder).items()}

    monkeypatch.setattr(pretrained, "read_tensors", counted)
    opened, mesh = open_pretrained(tmp_path), make_mesh(mesh, jax.devices()[:4])
    shardings = param_shardings(opened.shapes, mesh, opened.sharding)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), opened.shapes, shardings)
    reads.clear()
    params = opened.params(like)
    assert sum(reads) == sum(x.nbytes for x in jax.tree.leaves(params))
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    monkeypatch.undo()
    model = from_pretrained(tmp_path, shardings=partial(param_shardings, mesh=mesh, rules=opened.sharding))
    for found in (params, functional(model)[1]):
        jax.tree.map(np.testing.assert_array_equal, found, functional(from_pretrained(tmp_path))[1])


def test_a_part_of_any_layout_is_that_of_the_whole(folder):
    for layout, shape in (
        *((layout, (6, 4)) for layout in (AS_IS, LINEAR, linear_to_heads(2, 3), linear_from_heads(2, 2))),
        *((CONV, (6, 4, 3, 2)[:n]) for n in (3, 4)),
        (EXPERTS, (3, 6, 4)),
    ):
        tensor = np.arange(np.prod(shape)).reshape(shape)
        whole = layout.to_jax(tensor)
        index = tuple(slice(1, max(size - 1, 2)) for size in whole.shape)
        for param, tensors, expected, part in (
            (TorchParam("w", layout), {"w": tensor}, whole, index),
            (
                TorchParam("h.{layer}.w", layout),
                {f"h.{i}.w": tensor + i for i in range(3)},
                np.stack([whole + i for i in range(3)]),
                (slice(1, 3), *index),
            ),
        ):
            stored = StoredLeaf(tensors, param, expected)
            np.testing.assert_array_equal(stored[part], expected[part])
            np.testing.assert_array_equal(np.asarray(stored), expected)
    stored = read_torch(folder / "model.safetensors").model["shared.weight"]
    np.testing.assert_array_equal(stored[2:9, 1:4], np.asarray(stored)[2:9, 1:4])


def test_a_digest_is_of_the_configuration_and_of_the_headers_sizes_and_bytes_of_all_shards(tmp_path):
    saved(t5(), tmp_path, max_shard_size=2000)
    before = folder_digest(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert sorted(before) == sorted(map(str, [tmp_path / "config.json", *shards]))
    alter_config(tmp_path, d_kv=5)
    values = bytearray(shards[1].read_bytes())
    values[-1] ^= 1
    shards[1].write_bytes(values)
    large = shards[2]
    for content in (bytes(2**20), bytes(2**20 + 1), bytes(2**20) + b"1"):
        large.write_bytes((8).to_bytes(8, "little") + content)
        after = folder_digest(tmp_path)
        assert [name for name in before if after[name] != before[name]] == [
            str(x) for x in (tmp_path / "config.json", *shards[1:3])
        ]
        before = before | {str(large): after[str(large)]}


def test_names_of_a_bare_model_and_constants_of_old_checkpoints_are_accepted(tmp_path):
    theirs = made_by_transformers("gpt2", tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32), "h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    theirs.transformer.save_pretrained(tmp_path / "bare")
    save_file(bare, tmp_path / "bare" / "model.safetensors", metadata={"format": "pt"})
    equal(from_pretrained(tmp_path / "bare"), from_pretrained(tmp_path / "whole"))


def test_loading_holds_at_most_two_tensors_at_a_time(folder, monkeypatch):
    read, alive = StoredTensor.__array__, []

    def watched(tensor, *args, **kwargs):
        array = read(tensor, *args, **kwargs)
        # A view, such as a transpose, keeps its base alive.
        alive.append(weakref.ref(array))
        assert sum(ref() is not None for ref in alive) <= 2
        return array

    monkeypatch.setattr(StoredTensor, "__array__", watched)
    from_pretrained(folder, dtype=jnp.bfloat16)
    assert len(alive) == len(load_file(folder / "model.safetensors"))


def test_all_mismatches_are_named_at_once(folder):
    kernel = "encoder.block.1.layer.0.SelfAttention.q.weight"
    alter(folder, **{kernel: None, "shared.weight": np.ones((31, 7), np.float32), "extra": np.ones(2, np.float32)})
    message = refused(folder)
    assert f"missing {kernel}" in message
    assert "mis-shaped shared.weight: (31, 7) for shared (31, 8)" in message
    assert "unexpected extra" in message


def test_a_configuration_of_another_size_allocates_nothing(folder):
    alter_config(folder, d_model=10**12)
    assert "mis-shaped shared.weight: (31, 8) for shared (31, 1000000000000)" in refused(folder)
    alter_config(folder, d_model=8, num_layers=10**10)
    assert "has 10000000000 layers, the weights 47 tensors" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom'"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["T5ForTokenClassification"]}, "architecture 'T5ForTokenClassification'"),
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj must be one of relu, gated-gelu, got 'gated-silu'"),
        ({"d_model": "8"}, "is not a valid configuration"),
        ({"d_model": -8}, "is not a valid configuration"),
    ],
)
def test_an_unsupported_or_invalid_configuration_is_refused(folder, changes, message):
    alter_config(folder, **changes)
    assert message in refused(folder)


@pytest.mark.parametrize("model_type", pretrained.FAMILIES)
def test_a_configuration_without_sizes_is_refused(folder, model_type):
    sizes = dict.fromkeys(("hidden_size", "n_embd", "num_attention_heads", "d_kv", "hidden_sizes"), None)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    assert refused(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "", "[" * 100_000])
def test_a_configuration_that_is_not_a_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert "download it again" in refused(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ""])
def test_an_index_that_names_another_file_is_refused(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"shared.weight": name}}))
    assert f"names {name!r}, not a safetensors file in its folder" in refused(folder)


@pytest.mark.parametrize("linked", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder_is_refused(folder, linked):
    (folder / linked).rename(folder.parent / "outside")
    (folder / linked).symlink_to(folder.parent / "outside")
    assert "links out of its folder" in refused(folder)


def test_weights_only_in_a_pickle_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has only pytorch_model.bin, a pickle, which can run code" in refused(folder)


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({"shared.weight": tensors["shared.weight"]}, folder / shard)
    places = {"x": "a.safetensors", "y": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "shared.weight is in b.safetensors and in another shard" in refused(folder)


def test_a_header_with_false_offsets_is_refused(folder):
    header = json.dumps({"shared.weight": {"dtype": "F32", "shape": [31, 8], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert "is not a safetensors file" in refused(folder)


def test_a_folder_with_weights_is_not_overwritten(folder):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(jt.UserError, match=r"contains model.safetensors already"):
        saved(t5(), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_unsupported_dtype_is_refused(folder):
    with pytest.raises(jt.UserError, match="x64"):
        from_pretrained(folder, dtype=np.float64)
    with pytest.raises(jt.UserError, match="int32"):
        from_pretrained(folder, dtype=np.int32)


def hub(monkeypatch, snapshot_download):
    errors = types.SimpleNamespace(HfHubHTTPError=type("HfHubHTTPError", (Exception,), {}))
    module = types.SimpleNamespace(snapshot_download=snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_an_id_is_downloaded_into_the_hubs_cache(folder, monkeypatch):
    """Files of the cache's snapshots are links to blobs."""
    snapshot = folder.parent / "models--org--tiny" / "snapshots" / "abc"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(blobs / name)
    asked = []

    def snapshot_download(repository, *, allow_patterns):
        asked.append((repository, allow_patterns))
        return str(snapshot)

    hub(monkeypatch, snapshot_download)
    equal(from_pretrained("org/tiny"), t5())
    assert [repository for repository, _ in asked] == ["org/tiny"]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked[0][1])


def test_failed_downloads_and_wrong_paths_are_explained(monkeypatch):
    def offline(repository, **_):
        raise OSError("no network\nmore")

    hub(monkeypatch, offline)
    assert "org/tiny is not a folder and cannot be downloaded (no network): use a local folder" in refused("org/tiny")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refused("org/tiny")
    assert "./tiny is not a folder" in refused("./tiny")
    assert "is not a folder" in refused("/no/such/folder")


def test_the_written_configuration_describes_the_model(folder):
    written = json.loads((folder / "config.json").read_text())
    assert {**to_hf(CONFIG), "dtype": "float32"} == written


def test_experts_that_are_missing_or_of_different_shapes_are_refused(tmp_path):
    made_by_transformers("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    assert expert in tensors
    for changed in (None, tensors[expert].T.copy()):
        alter(tmp_path, **{**tensors, expert: changed})
        assert "experts of model.layers.1 are missing or differ in shape" in refused(tmp_path)
