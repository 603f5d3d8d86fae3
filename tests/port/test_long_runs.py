"""Long runs of ported scripts: what the proof in float64 cannot see is noticed, and noise is not."""

from pathlib import Path

import numpy as np
import pytest

from jaxtrain.port.data import keep_loaders
from jaxtrain.port.long_run import Made
from jaxtrain.port.ported import ported
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from jaxtrain.port.write import write
from jaxtrain.run import load_recipe
from parity.long_runs import Seed, script_runs, verdict, with_recipe
from parity.ported import prove

from .duels import duel
from .loops import changed, script


class Runs:
    """A ported script with its long runs."""

    def __init__(self, path: Path) -> None:
        recording = record(path, [], 20)
        keep_loaders(path, [], [found.loader for found in recording.loaders])
        self.training, self.folder = understood(recording), path.parent
        self.result = ported(self.training)
        write(self.result, path, [], self.folder)
        self.of_script = script_runs(self.training, self.folder, path, [])

    def verdict(self, count: int = 3):
        """Return the verdict on the files as they are, of some seeds."""
        recipe = load_recipe(f"{self.folder / 'run.py'}::Run")[1]
        return verdict(self.training, with_recipe(self.training, recipe, self.of_script[:count]))


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = script(
        tmp_path_factory.mktemp("loop"),
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)",
        end="schedule.step()",
    )
    text = path.read_text()
    assert "torch.randn(50, 6), torch.randint(3, (50,))" in text
    path.write_text(text.replace("50", "100"))
    return Runs(path)


def test_a_library_may_read_batches_ahead(tmp_path: Path) -> None:
    path = script(tmp_path)
    path.write_text(path.read_text().replace("enumerate(loader)", "enumerate([*loader])").replace("50", "64"))
    found = Runs(path).verdict(1)
    assert found.passed, found.lines
    assert len(found.lines) == 1


def test_long_runs_of_the_written_files_are_those_of_the_script(loop: Runs) -> None:
    found = loop.verdict()
    assert found.passed, found.lines
    assert "200 updates, 3 seeds" in found.lines[0]
    (line,) = found.lines
    assert float(line.partition("apart ")[2].partition(" times")[0]) < 1


LOADER = "port.script_loader(SCRIPT, ARGS, 0, FOLDER)"
FAULTS = {
    "an epoch is shorter": ("run.py", "every=13", "every=12", "update 37: the learning rate"),
    "batches are not shuffled": (
        "run.py",
        f"train={LOADER}",
        f"train=__import__('torch').utils.data.DataLoader({LOADER}.dataset, 8)",
        "update 1: the batch",
    ),
    "the first batches come again": (
        "run.py",
        f"train={LOADER}",
        f"train=__import__('torch').utils.data.DataLoader([{LOADER}.dataset[i] for i in range(24)], 8, shuffle=True)",
        "update 1: the batch",
    ),
    "the last batch is left out": (
        "run.py",
        f"train={LOADER}",
        f"train=(lambda x: setattr(x.batch_sampler, 'drop_last', True) or x)(__import__('copy').deepcopy({LOADER}))",
        "update 13: the batch",
    ),
    "a value is rounded": (
        "model.py",
        "jnp.tanh(",
        "(lambda x: jnp.tanh(x) if x.dtype == 'float64' else jnp.tanh(x).astype('bfloat16').astype(x.dtype))(",
        "the losses are",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_float64_does_not_show_is_noticed(loop: Runs, fault: str) -> None:
    file, old, new, line = FAULTS[fault]
    with changed(loop.folder / file, old, new):
        assert prove(loop.result, loop.folder, "loop").passed
        found = loop.verdict(1)
    assert not found.passed
    assert found.lines[1].startswith(line), found.lines


@pytest.fixture(scope="module", params=["duel", "dropout"])
def noisy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("noisy")
    if request.param == "duel":
        return Runs(duel(folder, 9))
    return Runs(
        script(folder, model="model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))")
    )


def test_noise_is_not_noticed(noisy: Runs) -> None:
    found = noisy.verdict()
    assert found.passed, found.lines


def _made(losses: np.ndarray) -> list[Made]:
    return [Made(float(loss), (0.1,), "") for loss in losses]


def test_runs_of_one_distribution_rarely_need_more_seeds(loop: Runs) -> None:
    rng = np.random.default_rng(0)
    truth, more, far = np.linspace(2, 1, 200), 0, 0
    for _ in range(400):
        walks = 0.01 * rng.standard_normal((3, 3, 200)).cumsum(-1)
        more += verdict(loop.training, [Seed(*(_made(truth + walk) for walk in walks[i])) for i in range(3)]).needs_more
        walks[:, 2] += 1.5
        far += verdict(loop.training, [Seed(*(_made(truth + walk) for walk in walks[i])) for i in range(3)]).needs_more
    assert more <= 8
    assert far >= 395
