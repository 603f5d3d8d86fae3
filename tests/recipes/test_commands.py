"""Small versions of the recipes, run from the command line."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.cli import main
from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe
from jaxtrain.runner.checkpoint import Checkpoints
from jaxtrain.runner.preflight import check_labels_in_batch
from jaxtrain.runner.recipe_step import training_step

SMALL = "--batch-size 8 --log-every 2 --eval-every 4 --save-every 2"
ENCODER = "--num-hidden-layers 1 --hidden-size 8 --num-attention-heads 2"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla")))
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "texts").mkdir()
    for i in range(4):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 9)


def run(command: str) -> int:
    return main(command.split())


def last_evaluation(folder: str) -> dict:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {name: value for line in lines for name, value in line.items() if name.startswith("eval_")}


def test_an_encoder_trains_on_a_folder_of_text(capsys):
    assert run(f"train bert-stdlib --data texts --steps 4 --seq-len 16 {ENCODER} {SMALL} --out bert") == 0
    assert set(last_evaluation("bert")) == {"eval_loss", "eval_accuracy"}
    out = capsys.readouterr().out
    assert "█" in out
    assert "jaxtrain sample" not in out
    assert run("sample bert") == 0
    assert "█" in capsys.readouterr().out


def test_an_encoder_learns_the_classes_of_a_table(write_table):
    write_table({"text": [("bad", "good")[i % 2] * (1 + i % 3) for i in range(80)], "label": ["no", "yes"] * 40})
    command = f"train bert-keywords --data table.parquet --steps 40 --lr 2e-2 --seq-len 12 {ENCODER} {SMALL}"
    assert run(f"{command} --out classes") == 0
    assert last_evaluation("classes")["eval_accuracy"] == 1


def test_dates_train_from_the_command_line(capsys):
    assert run(f"train t5-dates --steps 4 --num-layers 1 --d-model 8 --num-heads 2 --eval-pairs 8 {SMALL}") == 0
    assert set(last_evaluation("runs/t5-dates")) == {"eval_loss", "eval_exact_match"}
    assert "→" in capsys.readouterr().out


def test_a_llama_trains_on_packed_texts_and_generates(capsys):
    sizes = "--num-hidden-layers 1 --hidden-size 8 --intermediate-size 8 --num-attention-heads 2 --seq-len 16"
    assert run(f"train llama-stdlib --data texts --packing --steps 4 {sizes} {SMALL} --num-key-value-heads 1") == 0
    capsys.readouterr()
    command = "sample runs/llama-stdlib --prompt thé --length 6 --temperature 0"
    assert run(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("thé")
    assert run(command) == 0
    assert capsys.readouterr().out == first


def test_running_statistics_are_resumed_to_the_same_bits():
    # A schedule that does not depend on the number of steps.
    command = f"train digits-resnet --width 4 --schedule constant --warmup-steps 2 {SMALL}"
    assert run(f"{command} --steps 4 --out parts") == 0
    before = model_state("parts")
    assert run("train --resume --out parts --steps 6") == 0
    assert run(f"{command} --steps 6 --out straight") == 0
    one, other = (model_state(folder) for folder in ("parts", "straight"))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))
    assert not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, before))


def model_state(folder: str):
    run_folder = RunFolder(Path(folder))
    recipe = read_recipe(run_folder)[1]
    task = recipe.task()
    state = training_step(recipe, task).init(task.params, model_state=task.model_state, seed=0)
    with Checkpoints(run_folder.checkpoints) as checkpoints:
        return checkpoints.restore(state)[0].model_state


def test_integers_out_of_their_bounds_are_refused_by_name():
    task = RECIPES["digits-mlp"].task()
    for name, bound in {"label": 10, "tokens": 260}.items():
        bounded = type(task)(**{**vars(task), "bounds": {"tokens": 260}})
        check_labels_in_batch(bounded, {name: np.array([0, bound - 1])})
        with pytest.raises(UserError, match=rf"{name} must be in 0\.\.{bound - 1}, got 0 to {bound}: "):
            check_labels_in_batch(bounded, {name: np.array([0, bound])})
