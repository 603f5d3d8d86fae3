"""Fine-tuning of models of `transformers` that have no implementation in `jaxtrain.models`."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from jaxtrain import torch_import
from jaxtrain.cli import main
from jaxtrain.errors import UserError
from jaxtrain.models import Sampling
from jaxtrain.recipes.finetuning.imported_decoder import ImportedDecoder
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_state
from jaxtrain.torch_import.capture import token_embeddings
from tests.recipes.fine_tuning_twin import LENGTH, Twin, assert_alike, imported_config, write_examples, write_model
from tests.recipes.test_finetune_updates import trained_by_torch


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("imported")
    write_examples(root)
    return root


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("family", "loss", "method", "quantize", "packing"),
    [
        ("gpt_neox", "supervised", "lora", "none", True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("opt", "supervised", "dora", "nf4", True),
                ("gpt_neox", "dpo", "lora", "none", True),
                ("Gemma3Text", "supervised", "lora", "none", True),
                ("phi3", "supervised", "lora", "nf4", True),
                ("gpt_oss", "supervised", "full", "none", True),
                ("bloom", "supervised", "lora", "none", False),
                ("Gemma2", "dpo", "full", "none", True),
            ]
        ),
    ],
)
def test_twenty_updates_are_those_of_transformers_and_peft(root, monkeypatch, family, loss, method, quantize, packing):
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")
    twin = Twin(root, family, loss, method, quantize=quantize, packing=packing)
    assert_alike(twin.train(), trained_by_torch(twin))


def test_what_cannot_be_fine_tuned_is_refused_in_a_line(tmp_path, monkeypatch):
    def opened(config, **options):
        folder = tmp_path / config.model_type
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return ImportedDecoder.open(folder, 1, 8, **options)

    with pytest.raises(
        UserError, match="a BloomForCausalLM cannot keep the examples of a packed row apart: use --no-p"
    ):
        opened(imported_config("bloom"), packed=True)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with pytest.raises(UserError, match="the tokens of a BertLMHeadModel depend on later ones: use a decoder"):
        opened(transformers.BertConfig(**sizes, vocab_size=32), packed=False)
    file = tmp_path / "bloom/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match=r"the weights of .*bloom are quantized"):
        ImportedDecoder.open(tmp_path / "bloom", 1, 8, packed=False)
    monkeypatch.delattr(torch_import, "capture")
    monkeypatch.setitem(sys.modules, "jaxtrain.torch_import.capture", None)
    with pytest.raises(UserError, match="bloom is imported from PyTorch: pip install torch transformers"):
        ImportedDecoder.open(tmp_path / "bloom", 1, 8, packed=False)


def test_the_noise_of_neftune_is_added_to_multiplied_embeddings():
    module = transformers.AutoModelForCausalLM.from_config(imported_config("Gemma3Text"))
    assert token_embeddings(module) == ("model.embed_tokens.weight", 4.0)  # the root of the width
    module = transformers.AutoModelForCausalLM.from_config(imported_config("opt"))
    assert token_embeddings(module) == ("model.decoder.embed_tokens.weight", 1.0)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Qwen3Moe", "gpt_neox"])
def test_folders_are_read_and_written_as_transformers_stores_them(tmp_path, family):
    """The experts of a layer are stored one by one, and the head of GPT-NeoX has another name."""
    config = imported_config(family)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    decoder = ImportedDecoder.open(tmp_path / "model", 1, 8, packed=True)
    decoder.save_pretrained(tmp_path / "again", decoder.weights.params())
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x.float(), after[name]), name


EVERY = (
    "--log-every 1 --eval-every 2 --save-every 2 --answer-tokens 4 --lr 1e-2 --rank 2 --batch-size 4 "
    "--schedule constant --warmup-steps 1 --scored-answers 4"
)


def lines(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def restored(folder):
    _, recipe = read_recipe(RunFolder(Path(folder)))
    task = recipe.task()
    return task, restore_state(Path(folder, "checkpoints"), recipe, task)


def assert_writes_the_same(decoder, params, module, tokens):
    """Assert that texts after rows of tokens, the second without its first two, are those of `transformers`."""
    mask = np.array([[True] * 6, [False] * 2 + [True] * 4])
    found = np.asarray(decoder.generate(params, tokens, 5, mask=mask, stop=None, pad=0))
    module.generation_config.eos_token_id = None
    for row, written in enumerate(found):
        prompt = torch.tensor(tokens[row][mask[row]][None]).long()
        theirs = module.eval().generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
        assert written.tolist() == theirs.tolist()
        stop = int(written[2])
        expected = written.tolist()[: written.tolist().index(stop) + 1]
        streamed = decoder.stream(params, prompt[0].tolist(), 5, sampling=Sampling(), stop=stop, seed=0)
        assert [*streamed] == expected


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("family", "dtype", "flags"),
    [
        ("opt", torch.float32, "--neftune 5 --lora-dropout 0.2"),
        ("Gemma2", torch.bfloat16, "--method dora --quantize nf4 --mesh data=2,fsdp=2"),
    ],
)
def test_a_run_is_resumed_answers_and_is_exported(root, tmp_path, monkeypatch, capsys, family, dtype, flags):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")
    folder = write_model(tmp_path / "model", family)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder).to(dtype)
    made.save_pretrained(folder)
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6) + 3
    before = made.float().eval()(torch.tensor(tokens)).logits.detach().numpy()
    command = f"train finetune --model {folder} --data {root / 'supervised.jsonl'} --seq-len {LENGTH} {EVERY} {flags}"
    assert main(f"{command} --steps 6 --out whole".split()) == 0
    assert main(f"{command} --steps 4 --out parts".split()) == 0
    assert main(["train", "--resume", "--out", "parts", "--steps", "6"]) == 0
    (task, whole), (_, parts) = restored("whole"), restored("parts")
    jax.tree.map(np.testing.assert_array_equal, whole._replace(rng=0), parts._replace(rng=0))
    evaluations = [line for line in lines("whole") if "eval_loss" in line]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert "answers" in json.dumps(lines("whole"))
    stored = json.loads(Path("whole/checkpoints/6/state/_METADATA").read_text())["tree_metadata"]
    kinds = {name: entry["value_metadata"]["value_type"] for name, entry in stored.items()}
    assert {kind for name, kind in kinds.items() if "'base'" in name} == {"None"}
    capsys.readouterr()
    assert main(["sample", "whole", "--prompt", "3?", "--length", "4"]) == 0
    if "--mesh" not in flags:  # for which the plan takes more devices than this process has
        assert main(command.replace("train", "plan", 1).split()) == 0
    forms = ["huggingface --out stored", "huggingface --dtype float32", "peft"]
    for form in forms:
        assert main(f"export whole --format {form}".split()) == 0
    model = task.loss_fn.args[0]
    with jax.default_matmul_precision("highest"):
        positions = np.tile(np.arange(6, dtype=np.int32), (2, 1))
        expected = model.decoder.logits(task.exported(whole.params), tokens, positions, None)
    exported = transformers.AutoModelForCausalLM.from_pretrained("whole-huggingface")
    assert exported.dtype == torch.float32
    assert transformers.AutoModelForCausalLM.from_pretrained("stored").dtype == dtype
    assert_writes_the_same(model.decoder, model.adapted(whole.params), exported, tokens)
    found = [exported]
    if "nf4" not in flags:  # adapters of NF4 are for a base in NF4
        found.append(peft.PeftModel.from_pretrained(made, "whole-peft"))
    for module in found:
        logits = module.eval()(torch.tensor(tokens)).logits.detach().numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)
    assert np.abs(before - expected).max() > 1e-2
