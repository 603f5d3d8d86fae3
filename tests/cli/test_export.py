"""`jaxtrain export`: exported models compute the same outputs in other programs as the run's evaluation."""

import contextlib
import functools
import io
import re
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxtrain.cli import main
from jaxtrain.errors import RunFailed
from jaxtrain.export import huggingface, onnx_operators, stablehlo, torch_checkpoint
from jaxtrain.export.inference import build_inference
from jaxtrain.export.verify import BAR, NOISE
from jaxtrain.flags import parse
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe
from jaxtrain.runner.checkpoint import Checkpoints, restore_state
from jaxtrain.runner.recipe_step import training_step

SUFFIXES = {"torch": ".pt", "onnx": ".onnx", "stablehlo": "-stablehlo", "huggingface": "-huggingface"}
ENCODER = "--num-hidden-layers 2 --hidden-size 8 --num-attention-heads 2"
RUNS = {
    "digits-cnn": "--width 2",
    "gpt-stdlib": "--data texts --n-layer 2 --n-embd 8 --n-head 2 --seq-len 8 --eval-sequences 8",
    "digits-mlp": "--hidden 8 --precision bf16_params",
    "digits-resnet": "--width 4",
    "llama-stdlib": "--data texts --packing --num-hidden-layers 2 --hidden-size 8 --intermediate-size 8"
    " --num-attention-heads 2 --num-key-value-heads 1 --seq-len 8",
    "bert-stdlib": f"--data texts --seq-len 16 {ENCODER}",
    "bert-keywords": f"--data table.parquet --seq-len 12 {ENCODER}",
    "t5-dates": "--num-layers 2 --d-model 8 --num-heads 2 --eval-pairs 20",
}
QUICK = ("digits-cnn", "gpt-stdlib")
REST = [name for name in RUNS if name not in QUICK]
NEEDED = {"onnx": ("onnx", "onnxruntime"), "stablehlo": ("flatbuffers",)}
IN_TRANSFORMERS = {
    "gpt-stdlib": "AutoModelForCausalLM",
    "llama-stdlib": "AutoModelForCausalLM",
    "bert-stdlib": "AutoModelForMaskedLM",
    "bert-keywords": "AutoModelForSequenceClassification",
    "t5-dates": "AutoModelForSeq2SeqLM",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    (root / "texts").mkdir()
    for i in range(4):
        (root / "texts" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 20)
    return root


@pytest.fixture(scope="module")
def exported(root):
    """(run folder, exported path, printed output) by recipe and format."""
    done = {}

    def export(name, form):
        for needed in NEEDED.get(form, ()):
            pytest.importorskip(needed)
        folder = root / name
        if not folder.exists():
            create_run(root, name)
        if (name, form) not in done:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                assert main(["export", str(folder), "--format", form]) == 0
            done[name, form] = printed.getvalue()
        return folder, root / f"{name}{SUFFIXES[form]}", done[name, form]

    return export


def create_run(root, name):
    """Create a run whose weights, biases and statistics all differ from each other and from their initial values."""
    if "table.parquet" in RUNS[name]:
        write_table(root / "table.parquet")
    flags = [str(root / flag) if flag in ("texts", "table.parquet") else flag for flag in RUNS[name].split()]
    recipe = parse(RECIPES[name], flags, "train")
    task = recipe.task()
    state = training_step(recipe, task).init(task.params, model_state=task.model_state, seed=0)
    generator = np.random.default_rng(0)

    def shifted(x):
        floating = jnp.issubdtype(x.dtype, np.floating)
        return x + abs(0.1 * generator.normal(size=x.shape)).astype(x.dtype) if floating else x

    params, model_state = jax.tree.map(shifted, (state.params, state.model_state))
    run = RunFolder(root / name)
    run.create(name, recipe)
    with Checkpoints(run.checkpoints) as checkpoints:
        checkpoints.save(state._replace(params=params, model_state=model_state), {})


def write_table(path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["bad", "good good"] * 40, "label": ["no", "yes"] * 40}), path)


def batch_of(task, rows):
    examples = [task.validation[i] for i in range(rows)]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, np.floating) else x, tree)


@functools.cache
def evaluated(folder):
    """Return (inputs, logits in float64, logits in float32) of the evaluation, with its mask if the model takes one."""
    _, recipe = read_recipe(RunFolder(folder))
    task = recipe.task()
    state = restore_state(RunFolder(folder).checkpoints, recipe, task)
    found = build_inference(task, task.signature, state.params, state.model_state)
    batch = batch_of(task, 5)
    inputs = [batch[name].astype(x.dtype)[:, : x.shape[0]] for name, x in found.inputs.items()]

    def logits(dtype):
        if "index" in batch or "segments" in batch:
            return np.asarray(found.apply(cast(found.weights, dtype), *inputs), np.float64)
        trees = cast((state.params, batch, state.model_state), dtype)
        return np.asarray(task.predict(*trees).logits, np.float64)

    ours = logits(np.float32)
    with jax.enable_x64(True):
        return inputs, logits(np.float64), ours


def assert_same(got, truth, ours):
    """Check that the outputs are at most twice as far from float64 as those of JAX in float32."""
    distance, own = (np.linalg.norm(x - truth) / np.linalg.norm(truth) for x in (np.asarray(got), ours))
    assert distance <= BAR * max(own, NOISE)


@pytest.mark.parametrize("name", [*QUICK, *reversed(REST)])
def test_onnx_runtime_gives_the_logits_of_the_evaluation(name, exported):
    folder, out, _ = exported(name, "onnx")
    import onnx
    import onnxruntime

    onnx.checker.check_model(str(out), full_check=True)
    inputs, truth, ours = evaluated(folder)
    session = onnxruntime.InferenceSession(str(out))
    names = [x.name for x in session.get_inputs()]
    assert_same(session.run(["logits"], dict(zip(names, inputs, strict=True)))[0], truth, ours)
    if inputs[0].ndim == 2:
        longer = [np.repeat(x, 2, axis=1) for x in inputs]
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
            session.run(["logits"], dict(zip(names, longer, strict=True)))


@pytest.mark.parametrize("name", [*QUICK, *reversed(REST)])
def test_stablehlo_gives_the_logits_of_the_evaluation(name, exported):
    folder, out, _ = exported(name, "stablehlo")
    inputs, truth, ours = evaluated(folder)
    assert_same(runpy.run_path(str(out / "load.py"))["logits"](*inputs), truth, ours)


@pytest.mark.parametrize("name", ["gpt-stdlib", *(name for name in reversed(REST) if name in IN_TRANSFORMERS)])
def test_transformers_give_the_logits_of_the_evaluation(name, exported):
    folder, out, _ = exported(name, "huggingface")
    inputs, truth, ours = evaluated(folder)
    kind = getattr(transformers, IN_TRANSFORMERS[name])
    given = [torch.from_numpy(x.astype(np.int64)) for x in inputs]

    def logits(dtype):
        loaded = kind.from_pretrained(out, dtype=dtype).eval()
        mask = None if "gpt" in name or "llama" in name else (given[0] != loaded.config.pad_token_id).long()
        with torch.no_grad():
            return loaded(
                given[0], attention_mask=mask, **({"labels": given[1]} if len(given) > 1 else {})
            ).logits.numpy()

    assert_same(logits(torch.float32), truth, ours)
    # transformers computes the norms of these two in float32 in any dtype.
    if name not in ("llama-stdlib", "t5-dates"):
        np.testing.assert_allclose(logits(torch.float64), truth, rtol=1e-10, atol=1e-10)


def test_the_command_prints_the_signature_and_the_error(exported):
    folder, out, printed = exported("gpt-stdlib", "stablehlo")
    assert re.match(
        rf"exported {folder} to {out} after 0 updates: tokens int32\[batch, length ≤ 8\] → logits, "
        r"in batches of 1, 3 and 8 \d\.\de-0\d from float64, JAX's float32 \d\.\de-0\d\n",
        printed,
    )
    assert (out / "load.py").read_text() in printed


def perturbed(module, name, monkeypatch):
    """Patch `module.name` so that its arguments are larger by a thousandth."""
    right = getattr(module, name)

    def wrong(*args, **kwargs):
        return right(
            *jax.tree.map(lambda x: x * 1.001 if getattr(x, "dtype", None) == np.float32 else x, args), **kwargs
        )

    monkeypatch.setattr(module, name, wrong)


BREAKS = {
    "onnx": lambda m: m.setitem(onnx_operators.OPERATORS, "tanh", onnx_operators.OPERATORS["sin"]),
    "stablehlo": lambda m: perturbed(stablehlo, "write_tensors", m),
    "torch": lambda m: perturbed(torch_checkpoint, "to_torch", m),
    "huggingface": lambda m: perturbed(huggingface, "save_pretrained", m),
}


@pytest.mark.parametrize("form", ["onnx", "torch", "huggingface", "stablehlo"])
def test_an_export_with_different_outputs_is_not_written(form, exported, root, monkeypatch, capsys):
    for needed in NEEDED.get(form, ()):
        pytest.importorskip(needed)
    folder, *_ = exported("gpt-stdlib", "huggingface")
    BREAKS[form](monkeypatch)
    before = sorted(root.iterdir())
    capsys.readouterr()
    assert main(["export", str(folder), "--format", form, "--out", str(root / "broken")]) == RunFailed.exit_status
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.endswith(": not written\n")
    assert form == "torch" or re.search(
        r"differs from the logits in float64 by \d\.\de-0\d in a batch of \d; the bound is", err
    )
    assert sorted(root.iterdir()) == before


def test_an_impossible_export_is_a_one_line_error(exported, root, monkeypatch, capsys):
    folder, out, _ = exported("digits-cnn", "torch")
    before = sorted(root.iterdir())
    for flags, message in {
        f"--format onnx --out {out}": f"{out} already exists: choose another --out",
        f"--format huggingface --out {root}/new": "transformers has no CNN: export it as onnx, stablehlo or torch",
        f"--format onnx --out {root}/a/b": f"{root}/a is not a folder: create it or choose another --out",
        "--format tflite": "--format must be torch",
    }.items():
        capsys.readouterr()
        assert main(["export", str(folder), *flags.split()]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert message in err
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", str(folder), "--format", "onnx", "--out", f"{root}/new"]) == 2
    assert "onnx is not installed: pip install 'jaxtrain[onnx]'" in capsys.readouterr().err
    assert sorted(root.iterdir()) == before
