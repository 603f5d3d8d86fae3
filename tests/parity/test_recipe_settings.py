"""Every setting of a recipe that changes the numbers of a step is used by its proof, or named as not exercised."""

import json
from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtrain as jt
from jaxtrain import losses, optim
from jaxtrain.errors import UserError
from jaxtrain.optim import Call, complete_expression, parse_expression
from jaxtrain.optim.expression import OPTIMIZERS
from parity.cases.recipe_case import CHECKED, NAMED, WITHOUT_EFFECT, recipe_case
from parity.cli import main
from parity.compare.examination import judge, program_of
from parity.compare.reference import live_reference
from parity.run import examine
from parity.settings import settings_of
from parity.sides.torch_optimizers import CLASSES, has_counterpart
from parity.weights import completed

OTHER = {
    "weight_decay": 0.11,
    "schedule": "linear",
    "frozen": "out/*",
    "steps": 41,
    "batch_size": 4,
    "lr": 2.1e-3,
    "warmup_steps": 5,
    "beta2": 0.98,
    "clip_norm": 0.21,
    "optimizer": "adam",
}
"""A value of each setting that both sides use, other than that of `Settings`."""
SAME_NUMBERS = ("accumulate", "remat", "seed")
"""Settings of a check itself: the first two change no number, the last is that of data, weights and dropout."""
SCHEDULES = (
    *("warmup-cosine", "wsd", "onecycle", "linear", "constant", "step_lr(lr=0.01, step_size=2)"),
    *("multi_step_lr(lr=0.01, milestones=[1, 3])", "constant_lr(lr=0.01)", "linear_lr(lr=0.01)"),
    *("exponential_lr(lr=0.01, gamma=0.8)", "polynomial_lr(lr=0.01)", "cosine_annealing_lr(lr=0.01, t_max=4)"),
    "cosine_annealing_warm_restarts(lr=0.01, t_0=2)",
    "cyclic_lr(base_lr=0.001, max_lr=0.01, step_size_up=2)",
    "sequential(schedules=[linear_lr(lr=0.01), exponential_lr(lr=0.01, gamma=0.9)], milestones=[2])",
    "chained(schedules=[linear_lr(lr=0.01), exponential_lr(lr=0.01, gamma=0.9)])",
)
NAMED_VALUES = {
    "fp8_exclude": "head/*",
    "mesh": "data=2",
    "gradient_sums": "sharded",
    "reshard_after": "window",
    "pipeline_chunks": 2,
    "unroll": True,
    "ema": 0.999,
    "loss_scale": "static_loss_scale(scale=1024.0)",
    "deterministic": True,
    "max_skips": 7,
    "spike_factor": 3.0,
    "on_spike": "rollback",
    "patience": 4,
}


@dataclass(frozen=True, kw_only=True)
class Run(jt.Recipe):
    steps: int = 40
    batch_size: int = 8
    lr: float = 2e-3
    warmup_steps: int = 2
    clip_norm: float | None = 0.2
    width: int = 4

    def task(self):
        x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)

        def init():
            layer = {"kernel": jnp.zeros((3, self.width)), "bias": jnp.zeros(self.width)}
            return {"hidden": layer, "out": {"kernel": jnp.zeros((self.width, 3))}}

        def loss_fn(params, batch, rng):
            hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
            return jt.Loss.of(losses.cross_entropy(hidden @ params["out"]["kernel"], batch["y"])), {}

        return jt.Task(init=init, loss_fn=loss_fn, train={"x": x, "y": np.arange(32) % 3})

    def torch_model(self):
        made = torch.nn.Sequential(
            torch.nn.Linear(3, self.width), torch.nn.Tanh(), torch.nn.Linear(self.width, 3, bias=False)
        )
        if self.frozen:
            made[2].requires_grad_(False)
        return made

    def torch_loss(self, model, batch):
        # PyTorch refuses labels of 32 bits.
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


@dataclass(frozen=True, kw_only=True)
class Own(Run):
    def make_optimizer(self):
        return optim.sgd(self.lr, momentum=0.9, mask=optim.all_but(optim.no_decay), weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class OwnInBoth(Own):
    def torch_optimizer(self, params):
        named = dict(params)
        biases = [x for name, x in named.items() if name.endswith("bias")]
        weights = [x for name, x in named.items() if not name.endswith("bias")]
        groups = [{"params": weights, "weight_decay": self.weight_decay}, {"params": biases}]
        return torch.optim.SGD(groups, self.lr, momentum=0.9)


def examined(recipe, **settings):
    return examine(recipe_case(recipe), "fp64", **{"steps": 4, **settings})


def holds_with(planted, recipe, **settings):
    """Whether PyTorch's side of a recipe equals JAX's side of another."""
    case, other = (completed(recipe_case(r))[0] for r in (recipe, planted))
    given = settings_of(case, **{"steps": 4, **settings})
    reference = live_reference(case, "fp64", given)
    seed = settings_of(other).seed if planted.seed != recipe.seed else given.seed
    ours = program_of(other, "fp64", given).run(other, reference.weights, steps=given.steps, seed=seed)
    return judge(ours, reference).verdict.passed


def test_every_setting_is_used_named_or_changes_no_number():
    known = [*OTHER, *SAME_NUMBERS, *CHECKED, *NAMED, *WITHOUT_EFFECT]
    assert sorted(known) == sorted(field.name for field in fields(jt.Recipe))
    assert set(NAMED_VALUES) == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_setting_that_no_side_uses_is_named_with_its_value(name):
    value = NAMED_VALUES[name]
    assert f"{name} {value}" in recipe_case(replace(Run(), **{name: value})).not_exercised
    assert not [line for line in recipe_case(Run()).not_exercised if line.startswith(name)]


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_that_differs_in_jax_alone_is_found(name):
    assert not holds_with(replace(Run(), **{name: OTHER[name]}), Run())


@pytest.mark.parametrize("seed", range(12))
def test_every_setting_of_a_random_recipe_is_used_or_named(seed):
    rng = np.random.default_rng(seed)
    optimizers = [*CLASSES]
    given = {
        "optimizer": optimizers[rng.integers(len(optimizers))],
        "schedule": SCHEDULES[rng.integers(5)],
        "steps": int(rng.integers(20, 60)),
        "warmup_steps": int(rng.integers(0, 3)),
        "batch_size": int(rng.choice([4, 8, 12])),
        "accumulate": int(rng.choice([1, 2, 4])),
        "lr": float(10 ** rng.uniform(-3, -2)),
        "weight_decay": float(rng.uniform(0.01, 0.3)),
        "clip_norm": float(rng.uniform(0.02, 0.05)),
        "frozen": rng.choice([None, "out/*"]),
        "seed": int(rng.integers(9)),
        "width": int(rng.integers(2, 6)),
    }
    named = {name: value for name, value in NAMED_VALUES.items() if rng.random() < 0.3}
    recipe = Run(**given, **named)
    assert examined(recipe).verdict.passed
    assert {f"{name} {value}" for name, value in named.items()} <= {*recipe_case(recipe).not_exercised}
    for name in rng.choice(["lr", "batch_size", "clip_norm", "seed"], 2, replace=False):
        change = given[name] * 1.01 if isinstance(given[name], float) else given[name] + 4
        assert not holds_with(replace(recipe, **{name: change}), recipe), name


def test_a_seed_of_the_recipe_is_that_of_its_checks():
    case = recipe_case(Run(seed=3, accumulate=2, remat="full"))
    settings = settings_of(case)
    assert (settings.seed, settings.accumulate, settings.remat, settings.steps) == (3, 2, "full", 20)
    assert settings_of(recipe_case(Run(steps=7))).steps == 7


SETTINGS = [
    *(("adamw", schedule) for schedule in SCHEDULES),
    *((name, "constant") for name in CLASSES if name != "adamw"),
    ("{'hidden/kernel': sgd(momentum=0.5), 'out/kernel hidden/bias': sgd(weight_decay=0.3)}", "warmup-cosine"),
    ("adamw(b1=0.8, eps=1e-5, amsgrad=True)", "constant"),
]


@pytest.mark.parametrize(("optimizer", "schedule"), SETTINGS)
def test_a_recipe_holds_with_its_own_optimizer_and_schedule(optimizer, schedule):
    recipe = Run(optimizer=optimizer, schedule=schedule, accumulate=2, warmup_steps=1)
    examination = examined(recipe)
    assert examination.verdict.passed, examination.verdict.lines
    assert not [line for line in examination.not_exercised if "optimizer" in line]


def test_a_schedule_is_named_as_far_as_it_was_not_reached():
    line = "the schedule after update 4 of 40"
    assert line in examined(Run(warmup_steps=0)).not_exercised
    assert line not in examined(Own()).not_exercised
    with pytest.raises(UserError, match="steps must be at most 40, those of Run, got 41"):
        examined(Run(), steps=41)


def test_an_optimizer_without_a_counterpart_is_named():
    (line, *_) = recipe_case(Run(optimizer="adamw8bit")).not_exercised
    assert line.startswith("optimizer adamw8bit, schedule warmup-cosine: both sides train with AdamW with lr 0.002")
    (line, *_) = recipe_case(Own()).not_exercised
    assert line.startswith("make_optimizer: both sides train with AdamW with lr 0.002")
    assert line.endswith("define torch_optimizer(self, params)")


def test_an_own_optimizer_is_compared_with_its_pytorch_side():
    assert not [line for line in recipe_case(OwnInBoth()).not_exercised if "optimizer" in line]
    assert holds_with(OwnInBoth(), OwnInBoth())
    assert not holds_with(OwnInBoth(weight_decay=0.2), OwnInBoth())


def test_every_optimizer_has_a_counterpart_or_none():
    for name in OPTIMIZERS:
        defaults = {"learning_rate": Call("step_lr", {"lr": 0.1, "step_size": 3})}
        expression = complete_expression(parse_expression(name), OPTIMIZERS, defaults)
        assert has_counterpart(expression) == (name in CLASSES)
    composed = {"added", "at_turn", "clamped", "clipped"}
    assert set(OPTIMIZERS) - set(CLASSES) == {*composed, "adam8bit", "adamw8bit", "sgd8bit", "muon"}


def test_a_frozen_parameter_must_be_frozen_in_pytorch():
    class Trained(Run):
        def torch_model(self):
            return Run().torch_model()

    with pytest.raises(UserError, match=r"frozen 'out/\*' freezes parameters and torch_model none: set their"):
        recipe_case(Trained(frozen="out/*"))


FILE = """
from dataclasses import dataclass

import numpy as np
import torch
import jaxtrain as jt

model = jt.from_torch(torch.nn.Linear(3, 2), {"input": np.ones((4, 3), np.float32)})


@dataclass(frozen=True, kw_only=True)
class Imported(jt.Recipe):
    batch_size: int = 4
    steps: int = 3
    power: int = 2

    def task(self):
        x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
        loss = lambda outputs, batch: jt.Loss.of(abs(outputs[:, 0] - batch["label"]) ** self.power)
        return model.task(loss, train={"input": x, "label": np.arange(16)})


class Compared(Imported):
    def torch_loss(self, model, batch):
        assert batch["label"].dtype == torch.int64
        errors = (model(batch["input"])[:, 0] - batch["label"]).abs() ** self.power
        return errors.sum(), len(errors)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "imported.py"
    path.write_text(FILE)
    return path


def test_the_module_of_an_imported_recipe_is_known(file, tmp_path, capsys):
    assert main(["run", f"{file}::Imported"]) == 2
    error = capsys.readouterr().err
    assert error.endswith(
        "Imported has no PyTorch side: define the method torch_loss(self, model, batch), which returns (sum of the "
        "losses, weight)\n"
    )
    out = tmp_path / "rows.json"
    argv = [f"{file}::Compared", "--power", "3", "--lr", "1e-2", "--json", str(out)]
    assert main(["run", *argv, "--precision", "fp64"]) == 0
    (row,) = json.loads(out.read_text())["cases"]
    assert (row["steps"], row["optimizer"]) == (3, "adamw")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--p", "0"], "unrecognized argument --p: "),
        (["--power"], "--power needs a value: write --power=VALUE"),
        (["--power", "x"], "power must be an int, got 'x': change --power"),
        (["--step", "3"], "unrecognized argument --step: "),
    ],
)
def test_flags_are_fields_of_the_recipe_or_refused(file, argv, expected, capsys):
    assert main(["run", f"{file}::Compared", *argv]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(f"parity: {expected}")
