"""Every mistake in a user's case file is reported in one line, with its place or its remedy."""

import itertools

import pytest

from parity.cli import main

FILE = """
import jax
import jax.numpy as jnp
import numpy as np
import torch

import jaxtrain as jt
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from parity import AdamW, Case


def batch(seed, rows):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 3)).astype(np.float32), "y": rng.standard_normal(rows).astype(np.float32)}


def torch_model():
    return torch.nn.Linear(3, 1, bias=False)


def torch_loss(model, batch):
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).sum(), len(batch["y"])


def loss_fn(params, batch, rng):
    return jt.Loss.of(((batch["x"] @ params["w"])[:, 0] - batch["y"]) ** 2), {}


like = {"w": jax.ShapeDtypeStruct((3, 1), np.float32)}
names = NameTable({"w": TorchParam("weight", LINEAR)})
made = dict(name="case", rows=4, optimizer=AdamW(1e-2), clip_norm=None)
case = Case(
    torch_model=torch_model, torch_loss=torch_loss, loss_fn=loss_fn, params_like=like, names=names, batch=batch, **made
)
"""

BROKEN = {
    "a missing module": ("import torch\n", "import nosuchmodule\n", "No module named 'nosuchmodule'"),
    "no Python": ("import torch\n", "import torch import\n", "SyntaxError: "),
    "a learning rate below 0": ("AdamW(1e-2)", "AdamW(-1e-2)", "learning_rate of adamw must be at least 0, got -0.01"),
    "an error of its own": ("like = {", "raise RuntimeError\nlike = {", "RuntimeError (--debug"),
    "another name": ("case = Case(", "other = Case(", "'case' in "),
    "no case": ("case = Case(\n", "case = dict(\n", "'case' in "),
    "an unknown argument": ("case = Case(\n", "case = Case(rate=3,\n", "unexpected keyword argument 'rate'"),
    "a missing argument": (
        "case = Case(\n    torch_model=torch_model, ",
        "case = Case(\n    ",
        ": 'torch_model'",
    ),
    "no module": ("return torch.nn.Linear(3, 1, bias=False)", "return None", "torch_model returned NoneType: return"),
    "another width in PyTorch": ("Linear(3, 1, bias", "Linear(4, 1, bias", "mat1 and mat2 shapes cannot be multiplied"),
    "another parameter in PyTorch": ("1, bias=False)", "1)", "bias"),
    "another shape in JAX": ("((3, 1), np.float32)", "((3, 2), np.float32)", "w"),
    "another name in the table": ('TorchParam("weight"', 'TorchParam("kernel"', "kernel"),
    "another path in the table": ('NameTable({"w"', 'NameTable({"v"', "v"),
    "a loss without a weight in PyTorch": (".sum(), len(batch", ".sum() * len(batch", "torch_loss returned Tensor"),
    "a weight of None": (', len(batch["y"])', ", None", "a weight that is a NoneType: return a number"),
    "a weight of 0": (', len(batch["y"])', ", 0", "torch_loss returned the weight 0: return one above 0"),
    "a total that is a number": (".sum(), len", ".sum().item(), len", "a total that is a float: return a tensor"),
    "a loss for each row in PyTorch": (" ** 2).sum(), len", " ** 2), len", "a total of shape [4]"),
    "a loss apart from the parameters": (".sum(), len", ".sum().detach(), len", "does not depend on the model's"),
    "a loss without a weight in JAX": ("jt.Loss.of(((", "jnp.sum(((", "Loss"),
    "a wrong key in PyTorch": ('model(batch["x"])', 'model(batch["z"])', "KeyError: 'z'"),
    "a wrong key in JAX": ('(batch["x"] @', '(batch["z"] @', "'z'"),
    "other shapes in a product": ('params["w"])[:, 0]', 'params["w"].T)[:, 0]', "TypeError: "),
    "a NaN in the batch": ('"x": rng', '"x": np.nan * rng', "x of the batch has NaN: leave such rows out"),
    "a division by 0": (" ** 2).sum(), len", " ** 2).sum() / 0, len", "PyTorch's loss is inf in float64 too: look for"),
    "a list as a batch": ("return {", "return [1]\n    return {", "batch returned list: return arrays by name"),
    "a batch of lists": ('"y": rng', '"y": [1.0] * rows, "_": rng', "y of the batch is a list: return NumPy arrays"),
    "texts in a batch": ('"y": rng', '"t": np.array(["a"] * rows), "y": rng', "t of the batch is an array of <U1"),
    "other rows": ('"y": rng', '"t": np.zeros(7), "y": rng', "t of the batch has the shape [7]: put the 4 rows"),
    "rows that are no number": ("rows=4", "rows='4'", "rows must be an integer of at least 1, got '4'"),
    "an optimizer of PyTorch": ("AdamW(1e-2)", "torch.optim.AdamW", "optimizer is a type: use parity.AdamW(…)"),
}


COMMANDS = itertools.cycle(["run", "run", "locate", "prove"])


@pytest.mark.parametrize(("what", "command"), [*zip(BROKEN, COMMANDS, strict=False)])
def test_a_broken_case_is_reported_in_one_line(what, command, tmp_path, capsys):
    right, wrong, expected = BROKEN[what]
    assert FILE.count(right) == 1
    file = tmp_path / "mine.py"
    file.write_text(FILE.replace(right, wrong))
    options = {"run": ["--precision", "fp64", "--steps", "2"], "locate": ["--steps", "1"], "prove": []}
    assert main([command, f"{file}::case", *options[command]]) == 2
    shown = capsys.readouterr().err.splitlines()
    error = [line for line in shown if line.startswith("parity: ")]
    assert len(error) == 1, shown
    assert not [line for line in shown if "Traceback" in line or "  File " in line]
    assert expected in error[0]
    assert "Error(" not in error[0]  # the repr of an exception


def test_a_file_that_is_not_broken_holds(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert main(["run", f"{file}::case", "--precision", "fp64", "--steps", "2"]) == 0
