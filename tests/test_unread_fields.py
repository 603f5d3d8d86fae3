"""No reader drops a field without a word: an unknown one, in any object of a file, is refused or named in a warning."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import jaxtrain as jt
from jaxtrain import models
from jaxtrain.data import image_folder, npz
from jaxtrain.data.finetuning import (
    ModelTokenizer,
    encode_examples,
    encode_labelled,
    parse_labelled,
    read_examples,
    split_examples,
)
from jaxtrain.errors import UserError
from jaxtrain.interop import AS_IS, LINEAR, NameTable, TorchParam
from jaxtrain.interop.torch_file import read_torch
from jaxtrain.interop.torch_run import torch_run
from jaxtrain.models import (
    GPT2,
    GPT2Config,
    LoraConfig,
    functional,
    gpt2,
    load_adapters,
    lora,
    open_pretrained,
    save_adapters,
    save_pretrained,
)
from jaxtrain.models.files.hf_config import report_unread_settings
from jaxtrain.models.llama import MODEL_TYPES
from jaxtrain.records import Record, disregard, unread_fields
from tests.data.finetuning.templates import byte_level, write_folder

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "q"}]}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
# It reads of every object only the fields that it writes.
TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for p in m.content %}{{ p.type + p.text }}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- call.id ~ call.type ~ call.function.name ~ call.function.arguments.a }}
{%- endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "a"},
    "texts": {"prompt": "q", "completion": "a", "weight": 1.0},
    "messages": {"messages": [PARTS, {**ANSWER, "tool_calls": [CALL]}], "tools": [{"function": {"name": "add"}}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    "completion": {"prompt": [USER], "completion": [ANSWER]},
    "preference": {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]},
}
LABELLED = {**ROWS["messages"], "label": "good"}
UNKNOWN = ("zzz", "Weights", "x_1")
TOKEN = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the objects in a document."""
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from objects(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from objects(item, (*path, i))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    return at(value[path[0]], path[1:]) if path else value


def said(read: Callable[[Any], Any], document: Any) -> str:
    """Return the warnings and the refusal of a reader."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            read(document)
            refusal = ""
        except UserError as error:
            refusal = str(error)
    lines = [str(warning.message) for warning in caught] + [refusal] * bool(refusal)
    assert not any("\n" in line for line in lines)
    return "\n".join(lines)


def check(read: Callable[[Any], Any], document: Any) -> None:
    """Read a document with an unknown field in each of its objects, and without any."""
    assert said(read, document) == ""
    for i, path in enumerate(objects(document)):
        name, changed = UNKNOWN[i % len(UNKNOWN)], copy.deepcopy(document)
        at(changed, path)[name] = {"a": 1} if i % 2 else "b"
        assert name in said(read, changed), path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = write_folder(tmp_path_factory.mktemp("model"), "chatml", byte_level(), chat_template=TEMPLATE)
    return ModelTokenizer(folder)


def test_what_is_disregarded_or_shown_is_read_to_any_depth() -> None:
    record = Record({"a": {"b": [{"c": {"d": 1}}]}, "e": {"f": {"g": 2}}})
    disregard(record, "a")
    assert unread_fields(record) == ["e"]
    assert "'g': 2" in str(record)
    assert unread_fields(record) == []


@pytest.mark.parametrize("kind", [*ROWS, "labelled"])
def test_fields_of_examples(kind: str, texts: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", str(tmp_path / "cache"))

    def read(row: dict[str, Any]) -> None:
        file = tmp_path / f"{abs(hash(json.dumps(row)))}.jsonl"
        file.write_text(json.dumps(row))
        for _ in range(2):  # the second reads from the cache
            if kind == "labelled":
                encode_labelled(read_examples(file, parse_labelled), texts)
            else:
                encode_examples(read_examples(file), texts)

    check(read, LABELLED if kind == "labelled" else ROWS[kind])


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_fields_of_tokenizers(file: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml", byte_level())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    document = {**config, "added_tokens_decoder": {"900": TOKEN}} if "config" in file else {"pad_token": TOKEN}

    def read(values: dict[str, Any]) -> None:
        (folder / file).write_text(json.dumps(values))
        ModelTokenizer(folder)

    check(read, document)


def test_fields_of_models_and_adapters(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2)
    _, params = functional(GPT2(config, rngs=nnx.Rngs(0)))
    save_pretrained(tmp_path, params, config)
    names, settings = gpt2.torch_names(config), LoraConfig(".*/qkv/kernel", 2, 4.0)
    save_adapters(tmp_path, lora.init(jax.random.key(0), params, settings), settings, names)
    for name, load in (
        ("config.json", lambda: open_pretrained(tmp_path)),
        ("adapter_config.json", lambda: load_adapters(tmp_path, params, names)),
    ):
        file = tmp_path / name

        def read(values: dict[str, Any], file: Path = file, load: Callable[[], Any] = load) -> None:
            file.write_text(json.dumps(values))
            load()

        document = json.loads(file.read_text())
        check(read, document)
        file.write_text(json.dumps(document))


FAMILIES = {
    **dict.fromkeys((name for name in MODEL_TYPES if name != "mixtral"), models.llama),
    **{"mixtral": models.mixtral, "gpt2": models.gpt2, "bert": models.bert, "vit": models.vit},
    **{"resnet": models.resnet, "t5": models.t5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_families(family: str) -> None:
    """All that transformers itself writes is read, or known to have no effect on these models."""
    transformers = pytest.importorskip("transformers")
    classes = {"bert": ["BertForMaskedLM"], "vit": ["ViTForImageClassification"]}
    complete = transformers.AutoConfig.for_model(family, architectures=classes.get(family)).to_dict()

    def read(values: dict[str, Any]) -> None:
        record = Record(values)
        FAMILIES[family].from_hf(record)
        report_unread_settings(record, "config.json")

    assert said(read, complete) == ""
    assert "zzz" in said(read, {**complete, "zzz": 1})
    if "rope_parameters" in complete:
        assert "zzz" in said(read, {**complete, "rope_parameters": {**complete["rope_parameters"], "zzz": 1}})


@pytest.fixture(scope="module")
def run_parts() -> tuple[Any, ...]:
    """The parts of a PyTorch run that a script saves."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scheduler.step()
    return model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), scaler.state_dict()


TABLE = NameTable({"kernel": TorchParam("weight", LINEAR), "bias": TorchParam("bias", AS_IS)})
LIKE = {"kernel": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)}


@pytest.mark.parametrize("kind", ["script", "lightning"])
def test_parts_of_checkpoints(kind: str, run_parts: tuple[Any, ...], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights, optimizer, scheduler, scaler = run_parts
    document = {
        "script": {"model": weights, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "epoch": 1},
        "lightning": {"state_dict": weights, "optimizer_states": [optimizer], "lr_schedulers": [scheduler]},
    }[kind]

    def read(saved: dict[str, Any]) -> None:
        torch.save(saved, tmp_path / "saved.pt")
        run = torch_run(read_torch(tmp_path / "saved.pt"), TABLE, LIKE)
        step = jt.train_step(lambda params, batch, rng: 0.0, run.optimizer(), loss_scale=run.loss_scale())
        run.state(step)

    check(read, document)


def test_files_of_images(tmp_path: Path) -> None:
    for i in range(12):
        file = tmp_path / ("train" if i < 8 else "val") / ("cat", "dog")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(file)
    assert said(image_folder, tmp_path) == ""
    for folder in [path for path in tmp_path.rglob("*") if path.is_dir()] + [tmp_path]:
        for name in ("zzz.csv", "zzz.webp"):
            (folder / name).write_bytes(b"")
            assert name in said(image_folder, tmp_path), folder
            (folder / name).unlink()
    for folder in (tmp_path, tmp_path / "train", tmp_path / "val"):
        (folder / "zzz").mkdir()
        assert "zzz" in said(image_folder, tmp_path), folder
        (folder / "zzz").rmdir()


def test_arrays_and_files_of_splits(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((4, 2)), "y": np.array([0, 1, 0, 1])}
    np.savez(tmp_path / "a.npz", **arrays)
    assert said(npz, tmp_path / "a.npz") == ""
    np.savez(tmp_path / "a.npz", **arrays, zzz=np.zeros(3))
    assert "zzz" in said(npz, tmp_path / "a.npz")
    (tmp_path / "a.npz").unlink()
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}')
    assert said(split_examples, tmp_path) == ""
    for name in ("zzz.jsonl", "zzz.csv", "test.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}')
        assert name in said(split_examples, tmp_path)


def test_deeply_nested_fields_are_refused() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UserError, match="the field a is nested more than 100 deep: write it flatter"):
        Record({"a": deep})
