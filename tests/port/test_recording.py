"""What a script does is recorded, understood, and computed again to the bit; the rest is refused by line."""

import random
from pathlib import Path

import jax
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from jaxtrain.errors import UserError
from jaxtrain.optim import SCHEDULES, build_expression
from jaxtrain.port.ported import ported
from jaxtrain.port.rerun import check_rerun
from jaxtrain.port.script import record
from jaxtrain.port.short_passes import short_pass
from jaxtrain.port.training import Training
from jaxtrain.port.understand import understood

from .loops import line_of, script

OPTIMIZERS = (
    "SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "Adam(model.parameters(), lr=0.01, amsgrad=True)",
    "AdamW([{'params': model[0].parameters()}, {'params': model[2].parameters(), 'lr': 0.02}], lr=0.01)",
    "RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True)",
    "Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)",
    "NAdam(model.parameters(), lr=0.01)",
    "RAdam(model.parameters(), lr=0.01, weight_decay=0.1)",
    "Adamax(model.parameters(), lr=0.01)",
)
SCHEDULERS = (
    "",
    "StepLR(optimizer, 2, 0.5)",
    "CosineAnnealingLR(optimizer, 7, eta_min=1e-4)",
    "LinearLR(optimizer, 0.3, total_iters=3)",
    "OneCycleLR(optimizer, 0.1, total_steps=50, cycle_momentum=False)",
    "SequentialLR(optimizer, [S.ConstantLR(optimizer, 0.1, 2), S.ExponentialLR(optimizer, 0.9)], [2])",
)
FORWARDS = (
    "loss = criterion(model(x), y)",
    "loss = nn.functional.cross_entropy(model(x * 2)[:, :], y) + 1e-3 * model[0].weight.pow(2).sum()",
    "x = x + 0.1 * torch.randn_like(x); loss = criterion(nn.functional.dropout(model(x), 0.2), y)",
    "with torch.autocast('cpu', torch.bfloat16): logits = model(x)\n        loss = criterion(logits.float(), y)",
)


def generated(folder: Path, number: int) -> Path:
    """Write a script with parts drawn by a number."""
    draw = random.Random(number)
    k, scheduler = draw.choice([1, 1, 2]), draw.choice(SCHEDULERS)
    made = f"\nS = torch.optim.lr_scheduler\nscheduler = S.{scheduler}" if scheduler else ""
    by_epoch = bool(scheduler) and draw.random() < 0.5
    clip = draw.choice(["", "nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n            "])
    scaled = draw.random() < 0.3
    step = "scaler.step(optimizer); scaler.update()" if scaled else "optimizer.step()"
    unscales = draw.random() < 0.7
    clip = f"scaler.unscale_(optimizer)\n            {clip}" if scaled and clip and unscales else clip
    step += "; scheduler.step()" if scheduler and not by_epoch else ""
    return script(
        folder,
        optimizer=f"optimizer = torch.optim.{draw.choice(OPTIMIZERS)}{made}\n"
        + ("scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)" if scaled else ""),
        forward=draw.choice(FORWARDS),
        backward=(f"scaler.scale(loss / {k}).backward()" if scaled else f"(loss / {k}).backward()"),
        step=f"if (i + 1) % {k} == 0:\n            {clip}{step}; optimizer.zero_grad()",
        end="scheduler.step()" if by_epoch else "pass",
    )


@pytest.mark.parametrize("number", range(60))
def test_a_generated_script_is_understood_to_the_bit(tmp_path: Path, number: int) -> None:
    path = generated(tmp_path, number)
    text = path.read_text()
    # 50 rows are seven batches: whole windows of one, of two if the last batch is left out.
    path.write_text(text.replace("batch_size=8,", "batch_size=8, drop_last=True,") if "% 2" in text else text)
    training = understood(record(path, [], 17))
    check_rerun(training)
    assert training.accumulate == (2 if "% 2" in text else 1)
    assert training.is_scaled == ("GradScaler" in text)
    assert (training.clip is not None) == ("clip_grad_norm_" in text)
    assert training.is_by_epoch == ("    scheduler.step()" in text and "; scheduler.step()" not in text)
    assert (training.autocast is not None) == ("autocast" in text)


@pytest.mark.parametrize("scheduler", SCHEDULERS[1:])
@pytest.mark.parametrize("by_epoch", [False, True])
def test_the_schedule_has_the_recorded_rates(tmp_path: Path, scheduler: str, by_epoch: bool) -> None:
    path = script(
        tmp_path,
        optimizer=f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nS = torch.optim.lr_scheduler\n"
        f"scheduler = S.{scheduler}",
        step="optimizer.step(); optimizer.zero_grad()" + ("" if by_epoch else "; scheduler.step()"),
        end="scheduler.step()" if by_epoch else "pass",
    )
    training = understood(record(path, [], 17))
    expression = ported(training).optimizer.arguments["learning_rate"]
    # The seven batches of an epoch are its recorded ones.
    theirs = [update.settings[0]["lr"] for update in training.recording.updates]
    assert training.epoch == 7
    with jax.enable_x64(True):
        rate = build_expression(expression, SCHEDULES, {})
        assert [float(rate(i)) for i in range(17)] == pytest.approx(theirs, rel=1e-12)


REFUSED = {
    "a sum of all updates": (
        {
            "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1); kept = {}",
            "forward": "kept[i] = model(x).detach()\n"
            "        loss = criterion(model(x), y) + kept[max(i - 2, 0)].mean()",
        },
        "read what the model computed before",
        "loss.backward()",
    ),
    "another program": (
        {"forward": "out = model(x)\n        loss = criterion(out, y) if i % 2 else out.square().mean()"},
        "differ from update to update",
        "loss = criterion(out, y) if",
    ),
    "an optimizer that waits": (
        {
            "optimizer": "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
            "other = torch.optim.SGD(model[2].parameters(), lr=0.1)",
        },
        "an optimizer made no step in 17 updates",
        "other = torch.optim",
    ),
    "a norm of parameters that two optimizers update": (
        {
            "optimizer": "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
            "other = torch.optim.SGD(model.parameters(), lr=0.1)",
            "step": "optimizer.step(); loss = criterion(model(x), y); model.zero_grad(); loss.backward()\n"
            "        nn.utils.clip_grad_norm_(model.parameters(), 1.0); other.step(); model.zero_grad()",
        },
        "clips by the norm of parameters, some of which another one updates",
        "clip_grad_norm_",
    ),
    "a scaler of two optimizers": (
        {
            "optimizer": "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
            "other = torch.optim.SGD(model[2].parameters(), lr=0.1); scaler = torch.amp.GradScaler('cpu')",
            "backward": "scaler.scale(loss).backward()",
            "step": "scaler.step(optimizer); scaler.update()\n"
            "        loss = criterion(model(x), y); model.zero_grad(); scaler.scale(loss).backward()\n"
            "        scaler.step(other); scaler.update()",
        },
        "several optimizers and a GradScaler",
        "scaler.scale(loss).backward()",
    ),
    "a scaler of optimizers that step together": (
        {
            "optimizer": "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
            "other = torch.optim.SGD(model[2].parameters(), lr=0.1); scaler = torch.amp.GradScaler('cpu')",
            "backward": "scaler.scale(loss).backward()",
            "step": "scaler.step(optimizer); scaler.step(other); scaler.update()",
        },
        "several optimizers and a GradScaler",
        "scaler.step(optimizer)",
    ),
    "random numbers of NumPy in a module": (
        {
            "model": "import numpy as np\nclass Noisy(nn.Linear):\n"
            "    def forward(self, x): return super().forward(x) + torch.from_numpy(np.random.rand(3)).float()\n"
            "model = Noisy(6, 3)"
        },
        "Noisy draws random numbers of Python or NumPy",
        "loss = criterion(model(x), y)",
    ),
    "one model after another": (
        {
            "model": "models = [nn.Linear(6, 3), nn.Linear(6, 3)]; model = models[0]",
            "optimizer": "optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in models)",
            "end": "model, optimizer = models[1], other",
        },
        "an optimizer begins when another one has ended",
        "optimizer, other",
    ),
    "momenta by hand": (
        {"step": "optimizer.step(); optimizer.zero_grad(); optimizer.param_groups[0]['momentum'] = 0.1 * (i % 2)"},
        "settings of the optimizer change without a scheduler (momentum 0, then",
        "optimizer.step()",
    ),
    "a closure of LBFGS": (
        {
            "optimizer": "optimizer = torch.optim.LBFGS(model.parameters())",
            "step": "optimizer.step(lambda: loss)",
        },
        "LBFGS.step(closure)",
        "optimizer.step(lambda",
    ),
    "a window of a smaller last batch": (
        {"step": "if i % 3 == 2 or i == 6: optimizer.step(); optimizer.zero_grad()"},
        "the micro-batches of a window differ in size",
        "loss.backward()",
    ),
    "a module in both modes": (
        {
            "model": "model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))",
            "forward": "target = model.eval()(x)\n"
            "        loss = criterion(model.train()(x), y) + target.detach().square().mean()",
        },
        "model is called in training and in evaluation mode",
        "loss = criterion(model.train()",
    ),
    "weights that are changed after the step": (
        {"step": "optimizer.step(); optimizer.zero_grad(); model[0].weight.data.mul_(0.999)"},
        "model.0.weight is trained, and changed by hand",
        "optimizer.step()",
    ),
    "weights that shrink": (
        {"step": "optimizer.step(); optimizer.zero_grad(); [p.data.mul_(0.99) for p in model.parameters()]"},
        "model.0.bias is trained, and changed by hand",
        "optimizer.step()",
    ),
    "a part that thaws": (
        {"forward": "model[0].requires_grad_(i > 2); loss = criterion(model(x), y)"},
        "model.0.weight is trained in some updates alone",
        "optimizer.step()",
    ),
    "a part that freezes": (
        {"forward": "model[0].requires_grad_(i < 2); loss = criterion(model(x), y)"},
        "model.0.weight is trained in some updates alone",
        "optimizer.step()",
    ),
    "parameters that are added to the optimizer": (
        {
            "optimizer": "optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)",
            "forward": "if i == 3 and len(optimizer.param_groups) == 1:\n"
            "            optimizer.add_param_group({'params': model[0].parameters(), 'lr': 0.2})\n"
            "        loss = criterion(model(x), y)",
        },
        "model.0.weight is trained in some updates alone",
        "optimizer.step()",
    ),
    "a vector of gradients": (
        {"forward": "loss = model(x).mean(1)", "backward": "loss.backward(torch.ones(len(x)))"},
        "backward() with arguments",
        "loss.backward(torch",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_carried_over_is_refused_by_line(tmp_path: Path, kind: str) -> None:
    parts, problem, line = REFUSED[kind]
    path = script(tmp_path, **parts)

    def port() -> None:
        training = understood(record(path, [], 17))
        check_rerun(training)
        ported(training)

    with pytest.raises(UserError) as error:
        port()
    assert problem in str(error.value)
    assert line_of(path, line) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mode_that_changes_nothing_may_change(tmp_path: Path) -> None:
    """As after an evaluation, if the script forgets `model.train()`."""
    path = script(tmp_path, forward="model.train(i % 3 == 0); loss = criterion(model(x), y)")
    training = understood(record(path, [], 8))
    assert "in training and in evaluation mode" in str(training.other_mode)
    check_rerun(training)
    path = script(
        tmp_path,
        model="model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))",
        forward="model.train(i % 3 == 0); loss = criterion(model(x), y)",
    )
    with pytest.raises(UserError, match="in training and in evaluation mode"):
        check_rerun(understood(record(path, [], 8)))


VIEWS = (
    "data.flatten()[i * 42 + 5 :][:42].view(7, 6)",
    "data[i : i + 7, :6]",
    "data[i + 1 : i + 8, 1:7]",
    "data.T[1:7, i : i + 7].T",
    "data[:6, i : i + 1].T.expand(7, 6)",
)


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_tensor_have_the_bits_of_the_script(tmp_path: Path, view: str) -> None:
    """The order of sums in PyTorch depends on where a tensor is in memory, and on its strides."""
    path = script(
        tmp_path,
        model="model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)); data = torch.randn(64, 8)",
        forward=f"loss = model({view}).square().mean()",
    )
    check_rerun(understood(record(path, [], 8)))


UNSEEN = {
    "a gradient changed by hand": {"step": "model[0].weight.grad.mul_(0.5); optimizer.step(); optimizer.zero_grad()"},
    "gradients that are kept": {"step": "optimizer.step()"},
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_changes_an_update_and_is_not_recorded_is_refused(tmp_path: Path, kind: str) -> None:
    training = understood(record(script(tmp_path, **UNSEEN[kind]), [], 17))
    with pytest.raises(UserError, match="has another value when the recorded calls are made again"):
        check_rerun(training)


def test_a_script_keeps_its_own_arguments_output_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path = script(tmp_path, end="import sys, beside; print(sys.argv, __name__, beside.NAME)")
    before = {file.name for file in tmp_path.iterdir()}
    record(path, ["--lr", "0.1"], 17)
    assert f"{[str(path), '--lr', '0.1']} __main__ beside" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "ended with the exit status 3"),
        ("print(1)", "made no update by an optimizer"),
        ("print(1)\nprint({}['a'])", r"raised KeyError \(.*train.py:2\): run it by itself first"),
    ],
)
def test_a_script_that_trains_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        record(path, [], 5)


def test_training_is_read_from_one_epoch_that_ends(tmp_path: Path) -> None:
    training: Training = understood(
        record(
            script(
                tmp_path,
                optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
                "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
                end="scheduler.step(); break",
            ),
            [],
            17,
        )
    )
    assert training.is_by_epoch
    assert training.recording.is_over
    assert len(training.recording.updates) == 7
    assert not training.recording.is_shortened
    check_rerun(training)


@pytest.mark.parametrize(("rows", "count", "left_out"), [(48, 6, 0), (56, 7, 0), (60, 8, 0), (64, 8, 0), (75, 8, 2)])
def test_a_short_pass_has_the_first_batches_and_the_last(rows: int, count: int, left_out: int) -> None:
    loader, calls = DataLoader(TensorDataset(torch.arange(rows)), batch_size=8), []
    batches = [x.tolist() for (x,) in short_pass(loader, lambda: calls.append(1))]
    whole = [x.tolist() for (x,) in loader]
    assert batches == [*whole[:7], *whole[7:][-1:]]
    assert (len(batches), len(calls)) == (count, left_out)


def test_windows_of_batches_that_differ_in_size_are_one_program(tmp_path: Path) -> None:
    path = script(tmp_path, backward="(loss / 2).backward()", step="if i % 2: optimizer.step(); optimizer.zero_grad()")
    path.write_text(path.read_text().replace("batch_size=8", "batch_size=9"))  # six batches, the last one of five rows
    training = understood(record(path, [], 9))
    check_rerun(training)
    assert training.cut is not None
    assert training.cut.is_joined
    assert [[tuple(x.shape) for x in inputs.batch_of(b).values()] for b, inputs in training.programs] == [
        [(9, 6), (9,), (9, 6), (9,)],
        [(9, 6), (9,), (5, 6), (5,)],
    ]


def test_a_scheduler_of_a_metric_is_refused(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
        end="scheduler.step(loss)",
    )
    with pytest.raises(UserError, match=r"ReduceLROnPlateau\.step with arguments"):
        record(path, [], 17)
