"""The verdict on ports that somebody else wrote: right ones, known faults, and contracts that cannot be used."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parity.cli import main
from parity.verify import PortVerdict, behaviour, verify
from parity.verify.contract import read_contract
from parity.verify.planted import Planted
from parity.verify.source_case import source_case
from tests.parity.verify_faults import FAULTS

PORTS = Path(__file__).parent / "ports"
STYLES = ("perceptron", "batch_norm", "attention")
SEED = 7


def verdict(port: str, file: Path, seed: int = SEED) -> PortVerdict:
    return verify(PORTS / f"{port}_torch.py", file, PORTS / f"{port}.toml", seed)


def edited(tmp_path: Path, port: str, right: str, wrong: str) -> Path:
    """Return a port with one of its parts replaced."""
    text = (PORTS / f"{port}_jax.py").read_text()
    assert text.count(right) == 1
    file = tmp_path / "port.py"
    file.write_text(text.replace(right, wrong))
    return file


@pytest.mark.parametrize("port", STYLES)
def test_a_right_port_is_equal(port: str) -> None:
    """Pytrees with optax, flax.linen with SGD by hand, flax.nnx with Adam by hand."""
    found = verdict(port, PORTS / f"{port}_jax.py")
    assert found.equal, found.lines
    assert [*found.held] == ["interface", "numbers", "behaviour"]
    assert found.planted is not None
    assert found.planted.total >= 30
    assert len(found.planted.unnoticed) <= 6, found.planted.unnoticed


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_its_stage_tensor_and_update(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    found = verdict(fault.port, edited(tmp_path, fault.port, fault.right, fault.wrong))
    at = found.difference
    assert at is not None
    assert at.stage == fault.stage, found.lines
    if fault.tensor is not None:
        assert fault.tensor in at.tensors
    if fault.update is not None:
        assert at.update == fault.update
    assert fault.line in at.target_line
    assert [*found.held] == ["interface", "numbers", "behaviour"][: len(found.held)]


def test_there_are_twenty_faults_in_all_stages() -> None:
    assert len(FAULTS) >= 20
    assert {fault.stage for fault in FAULTS.values()} == {"interface", "numbers", "behaviour"}


def test_a_verdict_is_repeated_by_its_seed_and_another_verdict_draws_another(tmp_path: Path) -> None:
    port = edited(tmp_path, "perceptron", "var + 1e-5", "var + 1e-6")
    files = PORTS / "perceptron_torch.py", port, PORTS / "perceptron.toml"
    first, second = verify(*files), verify(*files)
    assert first.seed != second.seed
    assert first.difference is not None
    assert verify(*files, first.seed).difference == first.difference != second.difference


def test_a_port_that_remembers_a_seed_differs_on_another(tmp_path: Path) -> None:
    """The losses and weights of a seed, written into a port, do not help it."""
    remembered = (
        "    known = batch['x'][0, 0] == {}\n    loss = jnp.where(known, loss, 0.99 * loss)\n    updates, opt = tx"
    )
    first = np.random.default_rng(int(np.random.SeedSequence([SEED, 0]).generate_state(1)[0])).standard_normal()
    port = edited(tmp_path, "perceptron", "    updates, opt = tx", remembered.format(f"jnp.float32({first})"))
    at = verdict("perceptron", port, SEED + 1).difference
    assert at is not None
    assert (at.tensor, at.update) == ("loss", 1)


def test_the_noise_of_a_bias_correction_changes_the_learning_rate_of_every_update_and_no_schedule() -> None:
    source, _ = read_contract(PORTS / "perceptron.toml", PORTS / "perceptron_torch.py", PORTS / "perceptron_jax.py")
    case = source_case(source, SEED)
    sgd = replace(source, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = replace(case, source=sgd, rate=1.5).torch_optimizer(model)
    model.weight.grad = torch.ones(1, 1)
    before = model.weight.item()
    for moved in (0.75, 1.5):
        optimizer.step()
        assert before - model.weight.item() == pytest.approx(moved, rel=1e-6)
        assert optimizer.param_groups[0]["lr"] == 0.5


STYLE_FAULTS = {
    "a value that it keeps in a trace": (
        "    updates, opt = tx",
        "    loss = loss + 0 * COUNT[-1] if COUNT else loss\n    COUNT.append(loss)\n    updates, opt = tx",
        "step keeps a value of its trace outside of the state",
        "",
    ),
    "a step that reads a value": (
        "    updates, opt = tx",
        "    if loss > 100:\n        loss = loss + 1\n    updates, opt = tx",
        "step under jit raises TracerBoolConversionError",
        "if loss > 100",
    ),
    "a counter of Python": (
        "    updates, opt = tx",
        "    COUNT.append(0)\n    loss = loss + len(COUNT)\n    updates, opt = tx",
        "step called twice from one state returns different results",
        "",
    ),
    "a function in the state": ('"opt": tx.init(params)}', '"opt": tx.init}', "at opt: return a pytree of arrays", ""),
    "an error of init": (
        'weights["norm.weight"]',
        'weights["norm.scale"]',
        "init raises KeyError: 'norm.scale'",
        "scale",
    ),
    "three results": ('"opt": opt}, loss', '"opt": opt}, loss, {}', "step returns tuple, not (state, loss)", ""),
    "a loss by row": ("labels).mean()", "labels)", "step raises TypeError", "value_and_grad"),
    "a tensor that PyTorch does not have": (
        '"norm.bias": params["norm"]["bias"]}',
        '"norm.bias": params["norm"]["bias"], "norm.eps": 1e-5}',
        "weights returns norm.eps, which PyTorch's state_dict does not have",
        "",
    ),
    "two tensors exchanged": (
        '{"norm.weight": params["norm"]["scale"], "norm.bias": params["norm"]["bias"]}',
        '{"norm.weight": params["norm"]["bias"], "norm.bias": params["norm"]["scale"]}',
        "weights(init(w)) returns other values of norm.weight: it is norm.bias",
        "",
    ),
    "another shape": (
        'params[name]["kernel"].T for',
        'params[name]["kernel"].reshape(-1) for',
        "weights(init(w)) returns fc1.weight of shape (36,), not (6, 6)",
        "",
    ),
    "weights in float32": (
        'params[name]["kernel"].T for',
        'params[name]["kernel"].T.astype(jnp.float32) for',
        "weights converts fc1.weight to float32",
        "",
    ),
    "a state of another structure": (
        '"opt": opt}, loss',
        '"opt": opt, "loss": loss}, loss',
        "step returns a state of another structure",
        "",
    ),
}


@pytest.mark.parametrize("name", STYLE_FAULTS)
def test_a_port_without_the_interface_is_told_what_to_do(name: str, tmp_path: Path) -> None:
    right, wrong, what, line = STYLE_FAULTS[name]
    file = edited(tmp_path, "perceptron", right, wrong)
    file.write_text(f"COUNT = []\n{file.read_text()}")
    at = verdict("perceptron", file).difference
    assert at is not None
    assert at.stage == "interface"
    assert what in at.what
    assert line in at.target_line


def test_a_step_without_float64_is_compared_in_float32_and_the_verdict_says_so(tmp_path: Path) -> None:
    """A callback returns float32, whatever the precision of the program."""
    called = (
        "    like = jax.ShapeDtypeStruct((8, 6), jnp.float32)\n"
        "    called = jax.pure_callback(lambda x: np.asarray(x), like, batch['x'])\n"
        "    batch = {**batch, 'x': called}\n    loss, grads = jax.value_and_grad"
    )
    port = edited(tmp_path, "perceptron", "    loss, grads = jax.value_and_grad", called)
    port.write_text(f"import numpy as np\n{port.read_text()}")
    found = verdict("perceptron", port)
    assert found.equal, found.lines
    assert found.planted is None
    assert any(note.startswith("not compared in float64, and no bugs planted: ") for note in found.notes)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(port.read_text().replace("var + 1e-5", "var + 1e-3"))
    at = verdict("perceptron", wrong).difference
    assert at is not None
    assert at.stage == "numbers"


def test_a_batch_that_no_seed_changes_is_noted(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text((PORTS / "batch_norm_torch.py").read_text().replace("default_rng(seed)", "default_rng(0)"))
    port = edited(tmp_path, "batch_norm", '"1.bias": params["bias"]}', "}")
    found = verify(source, port, PORTS / "batch_norm.toml", SEED)
    assert found.difference is not None
    assert found.difference.tensor == "1.bias"
    with_all = verify(source, edited(tmp_path, "batch_norm", "0.05 * (g", "0.06 * (g"), PORTS / "batch_norm.toml", SEED)
    assert any("the same for every seed" in note for note in with_all.notes)


def test_the_page_for_agents_shows_a_verdict(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    files = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page, re.S))
    for name in ("train.py", "port.py", "contract.toml"):
        (tmp_path / name).write_text(files[name])
    source, port, contract = (tmp_path / name for name in ("train.py", "port.py", "contract.toml"))
    assert "\n".join(verify(source, port, contract, 3).lines) == files["verdict"].strip()
    right = tmp_path / "right.py"
    right.write_text(files["port.py"].replace("adamw(1e-2)", "adamw(1e-2, weight_decay=1e-2)"))
    assert verify(source, right, contract, 3).equal


def test_the_verdict_is_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = edited(tmp_path, "perceptron", "var + 1e-5", "var + 1e-6")
    argv = ["verify", str(PORTS / "perceptron_torch.py"), str(port), "--contract", str(PORTS / "perceptron.toml")]
    assert main([*argv, "--seed", "7", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document.keys() == {
        *("equal", "source", "target", "seed", "stages", "difference", "planted", "notes", "environment")
    }
    assert (document["equal"], document["seed"], document["planted"]) == (False, 7, None)
    assert {stage: entry["result"] for stage, entry in document["stages"].items()} == {
        "interface": "holds",
        "numbers": "differs",
        "behaviour": "not run",
    }
    difference = document["difference"]
    assert (difference["stage"], difference["tensor"], difference["update"]) == ("numbers", "loss", 1)
    assert "self.norm" in difference["source_line"]
    assert "1e-6" in difference["target_line"]
    assert difference["distance"] > difference["bar"] == 1e-10
    assert "port.py is NOT the training of perceptron_torch.py" in err
    path = tmp_path / "verdict.json"
    assert main([*argv, "--seed", "7", "--json", str(path)]) == 1
    written = json.loads(path.read_text())
    assert written["difference"] == difference
    assert "--seed 7 repeats it" in capsys.readouterr().out


def test_a_verdict_that_holds_exits_0_and_lists_unnoticed_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    held = PortVerdict(Path("a.py"), Path("b.py"), 1, planted=Planted(3, ("b.py:2: x + 1: add left out",)))
    assert held.equal
    assert held.lines[1:3] == ["  noticed 2 of 3 planted bugs", "    unnoticed: b.py:2: x + 1: add left out"]
    assert held.as_json()["planted"] == {"noticed": 2, "total": 3, "unnoticed": ["b.py:2: x + 1: add left out"]}


CONTRACTS = {
    "no TOML": ('model = "Net"', "model = Net", "is not TOML"),
    "an unknown key": ('step = "train_step"', 'stepp = "train_step"', "unknown key 'stepp', did you mean 'step'"),
    "an unknown table": ("[target]", "[targets]", "unknown table [targets], did you mean 'target'"),
    "a missing key": ('init = "init"\n', "", 'has no init: add init = "NAME", a function of (weights)'),
    "a missing name": ('model = "Net"', 'model = "Nett"', "has no 'Nett', the contract's model, did you mean 'Net'"),
    "no name": ('init = "init"', "init = 3", "init in [target] of "),
    "no function": ('step = "train_step"', 'step = "DENSE"', "DENSE in "),
    "other arguments": ('step = "train_step"', 'step = "init"', "cannot be called as init(state, batch)"),
    "no length": ("updates = 80", "updates = 8.5", "updates in [source] of "),
    "no bound": ("clip_norm = 0.3", "clip_norm = -1", "clip_norm in [source] of "),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_that_cannot_be_used_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong, message = CONTRACTS[name]
    contract = tmp_path / "contract.toml"
    text = (PORTS / "perceptron.toml").read_text()
    assert right in text
    contract.write_text(text.replace(right, wrong))
    files = [str(PORTS / f"perceptron_{side}.py") for side in ("torch", "jax")]
    assert main(["verify", *files, "--contract", str(contract)]) == 2
    assert_one_line(capsys, message)


SOURCES = {
    "no module": ("class Net(nn.Module)", "class Net", "Net"),
    "a loss by row": ("label_smoothing=0.1)", "label_smoothing=0.1, reduction='none')", "tensor of shape [8]"),
    "no optimizer": ("torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)", "None", "returned NoneType"),
    "no rows": ('"y": rng.integers(0, 4, 8)', '"y": 3', "returned 'y' as int: return an array of rows"),
    "unequal rows": ("rng.integers(0, 4, 8)", "rng.integers(0, 4, 7)", "7 rows of 'y' and 8 elsewhere"),
    "a batch without its seed": ("default_rng(seed)", "default_rng()", "two arrays 'x' for one seed"),
    "a batch of NaN": (".astype(np.float32), ", ".astype(np.float32) * np.nan, ", "x of the batch has NaN"),
    "a schedule that ends": (
        "MultiStepLR(optimizer, [5, 40], gamma=0.5)",
        "OneCycleLR(optimizer, 1e-2, total_steps=12)",
        "give the length of the run as updates in [source]",
    ),
    "no schedule": ("torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 40], gamma=0.5)", "None", "returned NoneType"),
    "dropout": ("functional.gelu(self.fc1(x))", "functional.dropout(functional.gelu(self.fc1(x)))", "dropout"),
}


@pytest.mark.parametrize(
    ("runs", "held", "update"),
    [
        ([(9.0, 20), (0.5, 30), (1.5, 10)], True, None),
        ([(9.0, 20), (0.5, 30), (2.5, 10)], False, 10),
    ],
)
def test_the_median_of_the_seeds_decides_a_long_run(
    runs: list[tuple[float, int]], held: bool, update: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behaviour, "PortProgram", lambda *_: None)
    monkeypatch.setattr(behaviour, "_ratio", lambda case, program, seed: runs[seed - 5])
    found = behaviour.behaviour(SimpleNamespace(most=lambda updates: updates), None, 5)  # type: ignore[arg-type]
    assert isinstance(found, behaviour.Held) == held
    if isinstance(found, behaviour.Difference):
        assert (found.update, found.distance) == (update, 2.5)
    else:
        assert found.figures == {"seed 1": 9.0, "seed 2": 0.5, "seed 3": 1.5}


def test_the_distance_of_curves_is_that_of_means_over_windows() -> None:
    """Rounding of single updates cancels in a window; the last window may be shorter."""
    reference = np.linspace(3.0, 1.0, 25)
    noise = np.where(np.arange(25) % 2, 0.1, -0.1)
    noise[20:] = 0.0
    shift = np.repeat([0.0, 0.3, 0.4], 10)[:25]
    far, update = behaviour.distance(reference + noise + shift, reference)
    assert (far, update) == (pytest.approx(0.5 / 3**0.5), 25)
    assert behaviour.distance(reference - shift[::-1], reference)[1] == 10
    assert behaviour.distance([*reference[:-1], np.nan], reference)[0] == np.inf


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_cannot_be_used_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong, message = SOURCES[name]
    text = (PORTS / "perceptron_torch.py").read_text()
    assert right in text
    source = tmp_path / "source.py"
    source.write_text(text.replace(right, wrong))
    port = str(PORTS / "perceptron_jax.py")
    assert main(["verify", str(source), port, "--contract", str(PORTS / "perceptron.toml")]) == 2
    assert_one_line(capsys, message)


def test_missing_files_and_contracts_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    source, port, contract = (str(PORTS / f"perceptron{end}") for end in ("_torch.py", "_jax.py", ".toml"))
    for argv, message in (
        ([source, port], "a contract is required"),
        ([source, port, "--contract", "nothing.toml"], "'nothing.toml' cannot be read"),
        ([source, "nothing.py", "--contract", contract], "there is no file 'nothing.py'"),
        ([source], "required: TARGET"),
    ):
        assert main(["verify", *argv]) == 2
        assert_one_line(capsys, message)


def assert_one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("parity: ")]
    assert len(lines) == 1
    assert re.search(re.escape(message), lines[0]), lines
