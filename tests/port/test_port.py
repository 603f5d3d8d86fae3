"""`jaxtrain port`: whole scripts are written as recipes that are proved in float64, and that train."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import benchmarks.ported
from jaxtrain.cli import main
from jaxtrain.errors import UserError
from jaxtrain.port.data import ScriptRows, script_loader
from jaxtrain.port.ported import ported
from jaxtrain.port.recipe_source import _loss_source
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from jaxtrain.port.write import write
from jaxtrain.run import load_recipe
from parity.ported import ported_case, prove
from parity.run import check

from .loops import changed, script, written_port

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("name", ["classifier", "autoencoder"])
def test_a_script_is_written_as_a_recipe_that_is_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(benchmarks.ported, "ENGINES", ("torch_eager", "jax"))
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
    with changed(tmp_path / "shapes.json", '"shape_2/model.py": [', '"model.py": ["x [8, 6], y [8]",'):
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
        with changed(tmp_path / "shapes.json", '"shape_2/model.py": [', '"model.py": ["x [8, 6], y [8]",'):
            proof = prove(result, tmp_path, "small")
        assert not proof.passed
        assert all("batches of x [2, 6], y [2]: " in line for line in proof.lines[1:])
    params, batch = result.model.params, {"x": np.ones((3, 6), np.float32), "y": np.zeros(3, np.int32)}
    with pytest.raises(UserError, match=r"a batch has the shapes x \[3, 6\], y \[3\], and the models of"):
        load_recipe(f"{tmp_path / 'run.py'}::Run")[1].task().loss_fn(params, batch, jax.random.key(0))


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
