"""Fine-tuning from the command line."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxtrain.cli import main
from jaxtrain.errors import UserError
from jaxtrain.models import functional
from jaxtrain.recipes.finetune import FineTuneRecipe
from jaxtrain.recipes.finetuning.pretrained_decoder import adapter_targets
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_state
from jaxtrain.runner.checkpoint import Checkpoints
from jaxtrain.runner.training import build_training
from jaxtrain.runner.unsaved import Unsaved
from tests.data.finetuning.templates import byte_level, write_folder

LENGTH = 60  # of two conversations
SETTINGS = f"--seq-len {LENGTH} --batch-size 4 --schedule constant --warmup-steps 1 --rank 2 --answer-tokens 4"
EVERY = "--log-every 1 --eval-every 2 --save-every 2 --lr 1e-2"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of a model, made by `transformers`, of conversations and of preferences."""
    root = tmp_path_factory.mktemp("finetune")
    made = byte_level()
    write_folder(root / "model", "chatml", made)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=made.get_vocab_size(), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(root / "model")
    conversations, pairs = [], []
    for i in range(24):
        question, answer = {"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "42" * (1 + i % 3)}
        conversations.append({"messages": [question, answer]})
        pairs.append({"prompt": f"{i}? ", "chosen": "yes", "rejected": "no " * (1 + i % 2)})
    write_rows(root / "conversations.jsonl", conversations)
    write_rows(root / "pairs.jsonl", pairs)
    return root


def train(root, data, flags):
    return main(f"train finetune --model {root / 'model'} --data {root / data} {SETTINGS} {EVERY} {flags}".split())


def lines(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def state_of(folder):
    _, recipe = read_recipe(RunFolder(Path(folder)))
    return restore_state(Path(folder, "checkpoints"), recipe, recipe.task())


def test_the_examples_are_shown_before_anything_is_compiled(root, monkeypatch, capsys):
    monkeypatch.setattr(jax, "jit", lambda function, **options: function)
    assert train(root, "conversations.jsonl", "--show-data") == 0
    out = capsys.readouterr().out
    assert "«42" in out
    assert "examples of" in out
    assert "tokens" in out
    assert not Path("runs").exists()
    assert main(["train", "digits-mlp", "--show-data"]) == 2
    assert "omit --show-data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--quantize nf4 --method full", "quantize nf4 needs frozen weights: use --method lora"),
        ("--seq-len 65", "seq_len 65 exceeds the 64 positions of"),
        ("--targets q_proj", "targets 'q_proj' match no whole path of a linear layer: these are layers/"),
        ("--loss dpo", "the examples are of the kind Conversation: add the fields chosen and rejected"),
        (
            "--model a/b",
            "model a/b does not exist: give a local folder or file, or get it from the Hub: hf download a/b ",
        ),
        *((f"--model {x}", f"{x} does not exist: give a local folder or file\n") for x in ("a", "/b", "a/b/c")),
        ("--validation nowhere.jsonl", "validation nowhere.jsonl does not exist"),
        ("--chat-template nowhere.jinja", "chat_template nowhere.jinja does not exist: give a local folder or file"),
        ("--date 26.7.2024", "date 26.7.2024 is no date: write it as YYYY-MM-DD"),
        ("--normalize sequence --loss dpo", "normalize sequence is for --loss supervised: omit it"),
        ("--lora-dropout 1", "lora_dropout must be in [0, 1), got 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_line(root, flags, message, capsys):
    assert train(root, "conversations.jsonl", flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def test_targets_choose_linear_layers_by_their_whole_paths():
    decoder = SimpleNamespace(kernels=("layers/q/kernel", "layers/o/kernel"))
    assert re.fullmatch(adapter_targets(decoder, ".*/q/kernel"), "layers/q/kernel")
    assert not re.fullmatch(adapter_targets(decoder, ".*/q/kernel"), "layers/o/kernel")


@pytest.mark.parametrize("given", ["", "--model given", "--data given"])
def test_a_model_and_examples_are_required(given, capsys):
    Path("given").mkdir()
    assert main(f"train finetune {given}".split()) == 2
    assert capsys.readouterr().err == (
        "jaxtrain: fine-tuning needs a model and examples: use --model FOLDER --data FILE\n"
    )
    with pytest.raises(UserError, match="model nowhere does not exist"):
        FineTuneRecipe(model=Path("nowhere")).task()


@pytest.mark.parametrize("method", ["--method dora --quantize nf4 --mesh data=2,fsdp=2"])
def test_a_resumed_run_has_the_same_bits_and_its_checkpoints_hold_adapters_alone(root, method, capsys):
    assert train(root, "conversations.jsonl", f"--steps 4 --out whole {method}") == 0
    shutil.copytree("whole", "parts")
    shutil.rmtree("parts/checkpoints/4")
    assert main(["train", "--resume", "--out", "parts"]) == 0
    whole, parts = state_of("whole"), state_of("parts")
    jax.tree.map(np.testing.assert_array_equal, whole._replace(rng=0), parts._replace(rng=0))
    evaluations = [line for line in lines("whole") if "eval_loss" in line]
    assert [line["eval_loss"] for line in evaluations] == [x["eval_loss"] for x in lines("parts") if "eval_loss" in x]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    stored = json.loads(Path("whole/checkpoints/4/state/_METADATA").read_text())["tree_metadata"]
    kinds = {name: entry["value_metadata"]["value_type"] for name, entry in stored.items()}
    assert {kind for name, kind in kinds.items() if "'base'" in name} == {"None"}
    assert {kind for name, kind in kinds.items() if "'lora'" in name} == {"jax.Array"}
    assert any("'m'" in name for name in kinds if "'lora'" in name)
    assert "answers" in json.dumps(lines("whole"))
    capsys.readouterr()
    assert main(["sample", "whole", "--prompt", "3?", "--length", "4"]) == 0
    assert capsys.readouterr().out.strip()
    config = root / "model" / "config.json"
    text = config.read_text()
    config.write_text(text + " ")
    for command in ("train --resume --out parts --steps 6", "sample whole --prompt 3?", "export whole"):
        assert main(command.split()) == 2
        assert f"{config}, which the run's parameters are read from, changed" in capsys.readouterr().err
    config.write_text(text)


def write_run(folder, recipe):
    """Write a run whose adapters are not those of its start, without training it."""
    training, run = build_training(recipe), RunFolder(Path(folder))
    state, draw = training.init(), np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: x + 0.1 * draw.normal(size=x.shape).astype(x.dtype), state.params["lora"])
    run.create("finetune", recipe)
    evaluations = [{"step": step, "eval_loss": 3.5 - step, "eval_rouge_l": 0.25} for step in (0, 2)]
    write_rows(run.metrics, evaluations)
    with Checkpoints(run.checkpoints, unsaved=Unsaved.of(training.task)) as checkpoints:
        params = {**state.params, "lora": adapters}
        checkpoints.save(state._replace(params=params, step=jnp.int32(2)), {})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("quantize", [pytest.param("none", marks=pytest.mark.nightly), "nf4"])
def test_the_exports_have_the_logits_of_the_run(root, quantize, capsys):
    peft = pytest.importorskip("peft")
    initial = transformers.AutoModelForCausalLM.from_pretrained(root / "model")
    shutil.copytree(root / "model", "base")
    initial.to(torch.bfloat16).save_pretrained("base")
    folders = {"model": Path("base"), "data": root / "conversations.jsonl"}
    write_run("run", FineTuneRecipe(**folders, seq_len=LENGTH, batch_size=4, rank=2, method="dora", quantize=quantize))
    for form in ("huggingface", "peft"):
        assert main(f"export run --format {form}".split()) == 0
        out = capsys.readouterr().out
        assert re.search(r"(in transformers:|adapters for peft,) in batches of 1 \d", out), out
    _, recipe = read_recipe(RunFolder(Path("run")))
    task = recipe.task()
    params = state_of("run").params
    tokens = np.arange(12).reshape(2, 6)
    apply, _ = functional(task.signature.model)

    def logits(model):
        return model.eval().float()(torch.tensor(tokens)).logits.detach().numpy()

    def expected(params):
        with jax.default_matmul_precision("highest"):
            return jax.jit(apply)(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), tokens)

    merged = transformers.AutoModelForCausalLM.from_pretrained("run-huggingface")
    assert merged.dtype == torch.bfloat16
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), task.exported(params))
    np.testing.assert_allclose(logits(merged), expected(rounded), rtol=0, atol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    before = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, "run-peft"))
    np.testing.assert_allclose(adapted, expected(task.on_stored_base(params)), rtol=0, atol=1e-5)
    assert np.abs(before - adapted).max() > 1e-3
    chat = [{"role": "user", "content": "3?"}]
    folders = (root / "model", "run-huggingface", "run-peft")
    ids = [transformers.AutoTokenizer.from_pretrained(x).apply_chat_template(chat).input_ids for x in folders]
    assert ids[0] == ids[1] == ids[2]
    check_card("run-huggingface", "transformers", "finetune", quantize)
    check_card("run-peft", "peft", "adapter", quantize)


def check_card(folder, library, relation, quantize):
    """Check that the Hub's own reader understands a card, that its code runs, and that it has the run's figures."""
    card = huggingface_hub.ModelCard.load(f"{folder}/README.md")
    assert card.data.to_dict() == {
        "library_name": library,
        "tags": ["jaxtrain", "dora", "sft"],
        "pipeline_tag": "text-generation",
        "base_model": "base",
        "base_model_relation": relation,
    }
    assert "| metric | before | after 2 updates |\n| --- | --- | --- |\n| loss (nats) | 3.5000 | 1.5000 |" in card.text
    assert "| ROUGE-L | 0.2500 | 0.2500 |" in card.text
    assert ("in NF4" in card.text) == (quantize == "nf4")
    assert "| updates | 2 |" in card.text
    code = re.search(r"```python\n(.*?)```", card.text, re.S)[1]
    exec(code.replace("max_new_tokens=256", "max_new_tokens=2"), {})


@pytest.mark.parametrize("method", ["lora --quantize nf4", "full"])
def test_preferences_are_learned(root, method):
    assert train(root, "pairs.jsonl", f"--loss dpo --steps 6 --out run --method {method}") == 0
    first, *_, last = [line for line in lines("run") if "eval_loss" in line]
    np.testing.assert_allclose(first["eval_loss"], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(first["eval_reward_margin"], 0, atol=1e-5)
    assert last["eval_loss"] < first["eval_loss"] - 0.1
    assert last["eval_reward_accuracy"] == 1
    assert last["eval_reward_margin"] > 0
    assert main(["eval", "run", "--json", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert found == {
        **{"recipe": "finetune", "step": 6, "split": "validation"},
        **{key.removeprefix("eval_"): value for key, value in last.items() if key.startswith("eval_")},
    }
    assert main(["eval", "run", "--out", "page.html"]) == 2
