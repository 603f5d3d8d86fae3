"""Imported models as folders, read without PyTorch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import jaxtrain as jt
from jaxtrain.torch_import import load_imported
from tests.torch_import import bare

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import jax, numpy as np, jaxtrain as jt
model = jt.load_imported("saved")
given = dict(np.load("given.npz"))
key = jax.random.key(3)
loss_fn = model.loss(lambda y, batch: jt.Loss.of((y - 1) ** 2))
run = lambda params: loss_fn(params, given, key, model.state)[0].total
outputs, state = model(model.params, given, key, model.state)
loss, grads = jax.value_and_grad(run)(model.params)
evaluated, _ = model(model.params, given)
leaves = jax.tree.leaves((outputs, state, loss, grads, evaluated))
np.savez("results.npz", *map(np.asarray, leaves))
print(sorted(model.names.torch_order(model.params)), [name for name in model.params if model.frozen(name)])
try:
    model(model.params, {"x": np.ones((5, 8), np.float32), "mask": given["mask"]}, key)
except jt.UserError as error:
    print(error)
"""


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module, batch = bare.net()
    model = jt.from_torch(module, batch)
    model.save("saved")
    return module, model, {name: x.numpy() for name, x in batch.items()}


def test_a_saved_model_computes_the_same_bits_without_pytorch(saved) -> None:
    module, model, batch = saved
    np.savez("given.npz", **batch)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    key, loss_fn = jax.random.key(3), model.loss(lambda y, batch: jt.Loss.of((y - 1) ** 2))
    outputs, state = model(model.params, batch, key, model.state)
    loss, grads = jax.value_and_grad(lambda params: loss_fn(params, batch, key, model.state)[0].total)(model.params)
    ours = jax.tree.leaves((outputs, state, loss, grads, model(model.params, batch)[0]))
    theirs = np.load("results.npz")
    assert len(ours) == len(theirs.files)
    for name, x in zip(theirs.files, ours, strict=True):
        np.testing.assert_array_equal(theirs[name], np.asarray(x))
    printed = done.stdout
    assert str(sorted(name for name, _ in module.named_parameters())) in printed
    assert "['fixed']" in printed
    assert "saved has no graph for {mask: bool[6, 8], x: float32[5, 8]} with float32 parameters in training" in printed
    assert "only for {mask: bool[6, 8], x: float32[6, 8]} with float32 parameters in training; {" in printed


def test_a_file_that_is_not_valid_is_refused_in_one_line(saved) -> None:
    text = Path("saved/model.json").read_text()
    contents = json.loads(text)
    changes = {
        "truncated": text[:-99],
        "of another kind": json.dumps([1]),
        "an unknown operation": text.replace("aten.linear.default", "evil.linear.default"),
        "an unknown class": text.replace('"class": "Node"', '"class": "Popen"', 1),
        "a missing value": text.replace('"class": "Ref", "name": "', '"class": "Ref", "name": "no', 1),
        "a missing tensor": text.replace('"head.weight"', '"head.height"'),
        "another format": text.replace('["format", 1]', '["format", 2]'),
        "nested too deeply": "[" * 10**5,
        "empty": "",
    }
    assert contents
    for name, changed in changes.items():
        assert changed != text, name
        shutil.rmtree("wrong", ignore_errors=True)
        shutil.copytree("saved", "wrong")
        Path("wrong/model.json").write_text(changed)
        with pytest.raises(jt.UserError) as raised:
            load_imported("wrong")
        assert str(raised.value).startswith("wrong"), name
        assert "\n" not in str(raised.value), name
    Path("wrong/model.json").write_text(text)
    Path("wrong/model.safetensors").write_bytes(Path("saved/model.safetensors").read_bytes()[:-5])
    with pytest.raises(jt.UserError, match=r"model\.safetensors is not a safetensors file"):
        load_imported("wrong")
    with pytest.raises(jt.UserError, match="there has no"):
        load_imported("there")


def test_a_failed_save_leaves_nothing(tmp_path) -> None:
    class Complex(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))

        def forward(self, x):
            return (x * self.turn).abs()

    model = jt.from_torch(Complex(), np.ones((1, 2), np.float32))
    with pytest.raises(jt.UserError, match="buffer/turn is complex"):
        model.save(tmp_path / "saved")
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "there").mkdir()
    with pytest.raises(jt.UserError, match="already exists"):
        model.save(tmp_path / "there")
