"""Reward models and classifiers from the command line, beside `transformers` and `peft`."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxtrain.cli import main
from jaxtrain.models import functional, open_pretrained
from jaxtrain.models.lora import LoraConfig
from jaxtrain.recipes.finetuning.heads import _with_head as with_head
from jaxtrain.recipes.finetuning.trained_decoder import FineTunedModel
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_state
from tests.recipes.fine_tuning_twin import write_model

SETTINGS = "--seq-len 24 --batch-size 4 --schedule constant --warmup-steps 1 --rank 2 --lr 1e-2 --log-every 1"
EVERY = "--eval-every 3 --save-every 3"

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    write_model(root / "model", "llama")
    texts = [{"text": f"{i} " * (1 + i % 4) + "ab"[i % 2], "label": ("bad", "good")[i % 2]} for i in range(48)]
    pairs = [{"prompt": f"{i}? ", "chosen": "yes", "rejected": "no " * (1 + i % 2)} for i in range(24)]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize(("is_reward", "dropout"), [(True, 0.0), (False, 0.1)])
def test_adapters_of_rewards_have_no_dropout(is_reward, dropout):
    model = FineTunedModel(decoder=None, config=LoraConfig("w", dropout=0.1))
    assert with_head(model, is_reward).config == LoraConfig("w", dropout=dropout, trained="score")


def train(root, model, flags):
    return main(f"train finetune --model {model} --data {root}/texts.jsonl {SETTINGS} {EVERY} {flags}".split())


def state_of(folder):
    _, recipe = read_recipe(RunFolder(Path(folder)))
    task = recipe.task()
    return restore_state(Path(folder, "checkpoints"), recipe, task), task


def evaluations(folder):
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_loss" in line]


def test_examples_of_a_head_are_shown_and_settings_that_cannot_work_are_refused(root, monkeypatch, capsys):
    monkeypatch.setattr(jax, "jit", lambda function, **options: function)
    assert train(root, root / "model", "--loss classification --show-data") == 0
    out = capsys.readouterr().out
    assert ", label good: " in out
    assert "labels: bad " in out
    for flags, message in (
        ("--loss reward", "the examples are of the kind PlainText: add the fields chosen and rejected"),
        ("--loss classification --neftune 5", "neftune 5.0 is for --loss supervised"),
        ("--loss classification --seq-len 65", "seq_len 65 exceeds the 64 positions of"),
        ("--loss classification --best-metric exact_match", "best_metric exact_match is for --loss supervised and dpo"),
    ):
        assert train(root, root / "model", flags) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_classifier_is_resumed_evaluated_and_exported(root, capsys):
    peft = pytest.importorskip("peft")
    assert train(root, root / "model", "--loss classification --steps 6 --out whole") == 0
    whole, task = state_of("whole")
    shutil.copytree("whole", "parts")
    shutil.rmtree("parts/checkpoints/6")
    assert main(["train", "--resume", "--out", "parts"]) == 0
    parts, _ = state_of("parts")
    jax.tree.map(np.testing.assert_array_equal, whole._replace(rng=0), parts._replace(rng=0))
    assert evaluations("whole")[-1]["eval_accuracy"] > 0.5
    stored = json.loads(Path("whole/checkpoints/6/state/_METADATA").read_text())["tree_metadata"]
    kinds = {name: entry["value_metadata"]["value_type"] for name, entry in stored.items()}
    assert {kind for name, kind in kinds.items() if "'base'" in name} == {"None"}
    assert {kind for name, kind in kinds.items() if "'lora'" in name} == {"jax.Array"}
    capsys.readouterr()
    assert main(["eval", "whole"]) == 0
    assert "predicted as" in (out := capsys.readouterr().out) or "correct" in out

    for form in ("huggingface", "peft"):
        assert main(f"export whole --format {form}".split()) == 0
    pad = task.texts.special("pad")
    tokens = np.array([[3, 4, 5, 6], [7, 8, pad, pad]])
    apply, _ = functional(task.signature.model)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(apply)(task.exported(whole.params), tokens)
    folder = transformers.AutoModelForSequenceClassification.from_pretrained("whole-huggingface")
    assert folder.config.id2label == {0: "bad", 1: "good"}
    adapters = peft.AutoPeftModelForSequenceClassification.from_pretrained("whole-peft", pad_token_id=pad)
    for model in (folder, adapters):
        found = model.eval()(torch.tensor(tokens)).logits.detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

    jax.tree.map(
        np.testing.assert_array_equal, open_pretrained("whole-huggingface").params(), task.exported(whole.params)
    )
    capsys.readouterr()
    assert train(root, "whole-huggingface", "--loss reward") == 2
    assert "the head of whole-huggingface has 2 outputs: use --loss classification" in capsys.readouterr().err
    assert train(root, "whole-huggingface", "--loss supervised") == 2
    assert "is a SequenceClassifier: use a decoder" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_reward_model_prefers_what_is_chosen(root):
    flags = "--loss reward --steps 6 --out run --quantize nf4 --method dora"
    assert train(root, root / "model", f"--data {root}/pairs.jsonl {flags} --mesh data=2,fsdp=2") == 0
    first, *_, last = evaluations("run")
    assert last["eval_loss"] < first["eval_loss"] - 0.1
    assert last["eval_reward_accuracy"] == 1
    assert last["eval_reward_margin"] > 0
