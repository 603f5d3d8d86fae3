"""`jaxtrain port`: whole scripts are written as recipes that are proved in float64, and that train."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import benchmarks.ported
from jaxtrain.cli import main
from jaxtrain.errors import UserError
from jaxtrain.port.data import ScriptRows, script_loader
from jaxtrain.port.ported import ported
from jaxtrain.port.recipe_source import _loss_source
from jaxtrain.port.rerun import check_rerun, set_start
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from jaxtrain.port.write import write
from jaxtrain.run import load_recipe
from jaxtrain.runner import build_training, loss_scale
from jaxtrain.runner.training import held_out_evaluation
from jaxtrain.torch_import import Line
from parity.ported import ported_case, prove
from parity.run import check

from .loops import changed, script, written_port

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("name", ["classifier", "autoencoder"])
def test_a_script_is_written_as_a_recipe_that_is_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(benchmarks.ported, "ENGINES", ("torch_eager", "jax"))
    monkeypatch.setattr(benchmarks.ported, "SECONDS", 600.0)  # however loaded the machine is
    assert main(["port", "--out", str(tmp_path / "port"), str(SCRIPTS / f"{name}.py")]) == 0
    page = capsys.readouterr().out
    assert "20 updates in float64" in page
    proof, behaviour, speed = (
        next(line for line in page.splitlines() if line.startswith(start)) for start in ("proof", "behaviour", "speed")
    )
    assert proof.endswith("  equal")
    assert behaviour.endswith("  equal")
    assert re.search(r"PyTorch eager [\d.]+ ms, JAX [\d.]+ ms a step, interleaved +[\d.]+x$", speed)
    assert "Behaviour" in (tmp_path / "port" / "proof.html").read_text()
    assert {"run.py", "model.py", "proof.html", "params.safetensors"} <= {x.name for x in (tmp_path / "port").iterdir()}
    run = [f"{tmp_path / 'port' / 'run.py'}::Run", "--steps", "3", "--eval-every", "3", "--log-every", "1"]
    assert main(["train", *run, "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


BUGS = {
    "rate": ("optimizer", lambda text: text.replace("learning_rate=0.1", "learning_rate=0.1001")),
    "momentum": ("optimizer", lambda text: text.replace("momentum=0.9", "momentum=0.91")),
    "bound": ("clip_norm", lambda bound: bound * 1.01),
    "moving average": ("ema", lambda _: 0.9),
    "loss scale": ("loss_scale", lambda _: "static_loss_scale(scale=2.0)"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("small")
    path = script(
        folder,
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        step="nn.utils.clip_grad_norm_(model.parameters(), 0.2); optimizer.step(); optimizer.zero_grad()",
    )
    result = written_port(path, 9, is_fed=False)
    return result, folder


def test_the_written_files_are_what_is_proved(small) -> None:
    assert check(ported_case(*small, "small"), steps=9).passed


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_written_settings_is_noticed(small, bug: str) -> None:
    result, folder = small
    name, change = BUGS[bug]
    text = (folder / "run.py").read_text()
    value = getattr(load_recipe(f"{folder / 'run.py'}::Run")[1], name)
    changed = text.replace("    def task(self)", f"    {name}: object = {change(value)!r}\n\n    def task(self)")
    (folder / "run.py").write_text(changed)
    try:
        proof = prove(result, folder, "small")
        assert not proof.passed
        assert len(proof.lines) > 1
    finally:
        (folder / "run.py").write_text(text)


def test_a_bug_in_the_written_model_is_noticed(small) -> None:
    result, folder = small
    with changed(folder / "model.py", "jnp.tanh", "jax.nn.soft_sign"):
        assert not check(ported_case(result, folder, "small"), steps=2).passed


def test_autocast_is_proved_to_be_as_accurate(tmp_path: Path) -> None:
    path = script(
        tmp_path, forward="with torch.autocast('cpu', torch.bfloat16): out = model(x)\n        loss = criterion(out, y)"
    )
    training = understood(record(path, [], 9))
    result = ported(training)
    write(result, path, [], tmp_path)
    proof = prove(result, tmp_path, "autocast")
    assert proof.passed, proof.lines
    assert any(line.startswith("bf16: ") and line.endswith("  as accurate") for line in proof.lines)
    rounded = "(lambda x: jnp.tanh(x) if x.dtype == 'float64' else jnp.tanh(x).astype('float8_e4m3fn').astype(x.dtype))"
    with changed(tmp_path / "model.py", "jnp.tanh", rounded):
        proof = prove(result, tmp_path, "autocast")
    assert not proof.passed
    assert proof.lines[0].endswith("  equal")  # each line has its own verdict
    assert any(line.startswith("bf16: ") and line.endswith("NOT AS ACCURATE") for line in proof.lines)


def test_values_are_clipped_and_rates_given_for_batches_of_each_shape(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        optimizer="optimizer = torch.optim.SGD([{'params': model[0].parameters()}, {'params': model[2].parameters(),"
        " 'lr': 0.2}], lr=0.1)",
        forward="x, y = torch.randn(8 - i % 2, 6), torch.arange(8 - i % 2) % 3\n"
        "        loss = nn.functional.cross_entropy(model(x), y, reduction='sum') / len(x)",
        step="optimizer.param_groups[1]['lr'] = 0.3 / (1 + i)\n"
        "        nn.utils.clip_grad_value_(model.parameters(), 0.02); optimizer.step(); optimizer.zero_grad()",
    )
    result = written_port(path, 9, is_fed=False)
    assert "shape_2" in (tmp_path / "shapes.json").read_text()
    proof = prove(result, tmp_path, "clipped")
    assert proof.passed, proof.lines
    for bug in (
        ("max_value=0.02", "max_norm=0.02"),
        ('batch.pop("rate_1")', 'batch.pop("rate_1") * 1.01'),
    ):
        with changed(tmp_path / "run.py", *bug):
            assert not prove(result, tmp_path, "clipped").passed
    with changed(tmp_path / "shapes.json", '"shape_2/model.py"', '"./model.py"'):
        assert not prove(result, tmp_path, "clipped").passed


@pytest.mark.parametrize(
    "loss", ["criterion(model(x), y)", "nn.functional.cross_entropy(model(x), y, reduction='sum') / len(x)"]
)
def test_a_smaller_last_batch_is_proved_too(tmp_path: Path, loss: str) -> None:
    path = script(tmp_path, forward=f"loss = {loss}")
    result = written_port(path, 9, is_fed=False)
    assert prove(result, tmp_path, "small").passed
    text = (tmp_path / "shapes.json").read_text()
    assert ("shape_2" in text) == ("len(x)" in loss) == (tmp_path / "shape_2").exists()
    if "len(x)" in loss:  # the first model alone is wrong for the smaller batch
        with changed(tmp_path / "shapes.json", '"shape_2/model.py"', '"./model.py"'):
            proof = prove(result, tmp_path, "small")
        assert not proof.passed
        assert all("batches of x [2, 6], y [2]: " in line for line in proof.lines[1:])
    params, batch = result.model.params, {"x": np.ones((3, 6), np.float32), "y": np.zeros(3, np.int32)}
    with pytest.raises(UserError, match=r"a batch has the shapes x \[3, 6\], y \[3\], and the models of"):
        load_recipe(f"{tmp_path / 'run.py'}::Run")[1].task().loss_fn(params, batch, jax.random.key(0))


@pytest.mark.parametrize(
    "clip", ["clip_grad_norm_(model.parameters(), 900.0)", "clip_grad_value_(model.parameters(), 90)"]
)
def test_scaled_gradients_are_clipped_as_by_the_script(tmp_path: Path, clip: str) -> None:
    path = script(
        tmp_path,
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**12, growth_interval=3)",
        forward="with torch.autocast('cpu', torch.float16): loss = criterion(model(x), y)",
        backward="scaler.scale(loss).backward()",
        step=f"nn.utils.{clip}\n        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()",
    )
    result = written_port(path, 9)
    assert prove(result, tmp_path, "scaled").passed
    ours = loss_scale(load_recipe(f"{tmp_path / 'run.py'}::Run")[1])
    theirs, state = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3), ours.init(jnp.zeros(40))
    bound = float(clip.partition(", ")[2][:-1])
    for number in range(9):
        scale = theirs.scale(torch.ones(())).item()
        assert state.scale == scale
        gradient = np.random.default_rng(number).normal(0, 0.01, 40).astype(np.float32) * np.float32(scale)
        gradient[7] = np.inf if number == 4 else gradient[7]
        p = torch.nn.Parameter(torch.zeros(40))
        p.grad = torch.tensor(gradient)
        getattr(torch.nn.utils, clip.partition("(")[0])([p], bound)
        theirs.step(torch.optim.SGD([p], lr=1.0))
        theirs.update()
        unscaled, state = ours.update(jnp.asarray(gradient), state)
        assert -p.detach().numpy() == pytest.approx(np.where(state.found_inf, 0, unscaled), rel=1e-6)


EVALUATED = {
    "model": "model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))\n"
    "held_out = DataLoader(TensorDataset(torch.randn(21, 6), torch.randint(3, (21,))), batch_size=10)",
    "end": "model.eval(); print(sum(criterion(model(x), y).item() for x, y in held_out))",
}


def test_a_script_is_evaluated_on_the_data_that_it_holds_out(tmp_path: Path) -> None:
    result = written_port(script(tmp_path, **EVALUATED), 9)
    assert prove(result, tmp_path, "evaluated").passed
    _, recipe = load_recipe(f"{tmp_path / 'run.py'}::Run")
    task = recipe.task()
    evaluation = held_out_evaluation(task, recipe)(build_training(recipe).init())
    module = result.training.modules["model"]
    set_start(result.training)
    x, y = task.validation.dataset.tensors
    with torch.no_grad():
        module.eval()
        theirs = [torch.nn.functional.cross_entropy(module(x[i : i + 8]), y[i : i + 8]).item() for i in (0, 8, 16)]
    assert evaluation.metrics["loss"] == pytest.approx(np.mean(theirs), rel=2e-6)
    with changed(tmp_path / "model.py", "x, train\n", "x, True\n"):
        proof = prove(result, tmp_path, "evaluated")
    assert not proof.passed
    assert any(line.startswith("evaluation: ") for line in proof.lines), proof.lines


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"forward": "loss = criterion(nn.functional.dropout(model(x)), y)"}, "draws random numbers in evaluation"),
        ({"forward": "loss = nn.functional.cross_entropy(model(x), y, reduction='sum') / 8"}, "the number 8"),
        ({"end": "print(sum(x.sum() for x in DataLoader(torch.randn(21, 6))))"}, None),
    ],
)
def test_what_cannot_be_evaluated_is_left_out_with_a_line(tmp_path: Path, parts: dict[str, str], reason: str) -> None:
    path = script(tmp_path, **{**EVALUATED, **parts})
    path.write_text(path.read_text().replace("(50", "(48"))  # whole batches
    result = ported(understood(record(path, [], 7)))
    assert result.validation is None
    assert (result.not_evaluated is None) == (reason is None)
    assert (reason or "") in (result.not_evaluated or "")


def test_a_module_of_a_package_is_a_script(tmp_path: Path) -> None:
    package = tmp_path / "mine" / "jobs"
    package.mkdir(parents=True)
    (package / "parts.py").write_text("from torch import nn\n\nmodel = nn.Linear(6, 3)\n")
    path = script(package, model="import sys; from .parts import model; assert sys.argv == [__file__]")
    module = tmp_path / "mine.jobs.train"
    training = understood(record(module, [], 8))
    check_rerun(training)
    assert (training.recording.updates[0].line or Line("", 1, "")).file == str(path)
    result = ported(training)
    write(result, module, [], tmp_path)
    assert "jaxtrain port -m mine.jobs.train" in (tmp_path / "run.py").read_text()
    assert prove(result, tmp_path, "module").passed
    assert load_recipe(f"{tmp_path / 'run.py'}::Run")[1].task().train.batch_size == 8  # of the module, run again


def test_the_data_of_a_recipe_are_the_scripts_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(
        tmp_path,
        model="model = nn.Linear(6, 3); from pathlib import Path; file = Path('rows.txt')\n"
        "rows = file.read_text().split(); file.write_text('')",
        forward="raise AssertionError('the script does not train')",
    )
    path.write_text(path.read_text().replace("torch.randn(50, 6)", "torch.randn(int(rows[0]), 6)"))
    (tmp_path / "rows.txt").write_text("50")
    loader = script_loader(path, [], 0, tmp_path)
    assert (tmp_path / "rows.txt").read_text() == "50"
    assert loader.batch_size == 8
    assert len(loader.dataset) == 50
    rows = ScriptRows(loader, ("x", "y"))
    orders = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        orders.append([int(row["y"]) for row in rows])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(int(y) for _, y in loader.dataset)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "a script is required"),
        (["nothing.py"], "nothing.py does not exist"),
        (["-m", "no.thing"], "no.thing does not exist"),
        (["-m"], "a script is required"),
        (["--updates", "0", "train.py"], "updates"),
        (["--out", ".", "train.py"], "is not empty"),
        (["train.py"], "depends on what the model computes"),
    ],
)
def test_a_refused_script_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    script(tmp_path, forward="w = 1 + model(x).mean().item()\n        loss = w * criterion(model(x), y)")
    monkeypatch.chdir(tmp_path)
    assert main(["port", *args]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("jaxtrain: ")
    assert message in error
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_a_recipe_counts_the_epochs_of_the_script(small) -> None:
    result, _ = small
    assert result.training.epoch == 7
    assert dataclasses.asdict(result.training.programs[0][1])["leaves"].keys() == {"x", "y"}


def test_the_step_clips_by_the_norm_and_a_micro_batch_has_its_share_of_a_window(small) -> None:
    result, folder = small
    recipe = load_recipe(f"{folder / 'run.py'}::Run")[1]
    assert recipe.clip_norm == 0.2
    assert str(recipe.optimizer).startswith("sgd(learning_rate=0.1, momentum=0.9,")
    for k, weight in ((1, "1"), (2, "1 / 2"), (3, "1 / 3")):
        window = dataclasses.replace(result.training, accumulate=k)
        assert f"jt.Loss(loss, {weight})," in _loss_source(dataclasses.replace(result, training=window))


CODEBOOK = """
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("counts", torch.zeros(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        ids = torch.cdist(z, self.codes).argmin(1)
        q = nn.functional.embedding(ids, self.codes)
        if self.training:
            hits = nn.functional.one_hot(ids, 5).type(z.dtype)
            self.counts.data.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(hits.t() @ z.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / (self.counts + 0.1).unsqueeze(1))
        return z + (q - z).detach(), (q.detach() - z).square().mean()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(6, 4), Codebook(), nn.Linear(4, 6)

    def forward(self, x):
        q, commitment = self.codebook(self.encoder(x))
        return self.decoder(q), commitment


model = Model()
"""


def test_a_codebook_follows_what_it_encodes(tmp_path: Path) -> None:
    """As that of a VQ-VAE with moving averages."""
    path = script(
        tmp_path,
        model=CODEBOOK,
        optimizer="optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)",
        forward="out, commitment = model(x); loss = (out - x).square().mean() + 0.25 * commitment",
    )
    result = written_port(path, 20, is_fed=False)
    proof = prove(result, tmp_path, "codebook")
    assert proof.passed, proof.lines
    with changed(tmp_path / "model.py", "0.9", "0.91"):
        assert not prove(result, tmp_path, "codebook").passed
