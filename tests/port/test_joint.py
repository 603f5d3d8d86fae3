"""Scripts of several optimizers that step together."""

from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.port.recipe_source import INPUTS
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from parity.ported import prove

from .loops import changed, line_of, script, written_port

MODEL = """first, second = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)"""
OPTIMIZERS = """optimizers = [
    torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
    torch.optim.Adam([{'params': [second.weight]}, {'params': [second.bias], 'lr': 0.02}], lr=0.01),
]
S = torch.optim.lr_scheduler
"""
FORWARD = "loss = criterion(second(first(x)), y)"
STEP = "[optimizer.step() for optimizer in optimizers]; [optimizer.zero_grad() for optimizer in optimizers]"
VARIANTS: dict[str, dict[str, str]] = {
    "plain": {},
    "clipped": {
        "backward": "loss.backward(); nn.utils.clip_grad_norm_(first.parameters(), 0.05)",
        "step": "optimizers[0].step(); nn.utils.clip_grad_value_(second.parameters(), 0.01); optimizers[1].step()\n"
        "        [optimizer.zero_grad() for optimizer in optimizers]",
    },
    "clipped together": {"backward": "loss.backward(); nn.utils.clip_grad_norm_(everything, 0.05)"},
    "schedulers": {
        "model": MODEL + "\nrates = lambda: [S.StepLR(optimizers[0], 1, 0.5), S.ExponentialLR(optimizers[1], 0.9)]",
        "end": "[scheduler.step() for scheduler in schedulers]",
    },
    "one scheduler": {
        "model": MODEL + "\nrates = lambda: [S.CosineAnnealingLR(optimizers[1], 9)]",
        "step": f"{STEP}; schedulers[0].step()",
    },
    "rates": {"step": f"optimizers[1].param_groups[0]['lr'] = 0.01 / (1 + i); {STEP}"},
    "accumulated": {"backward": "(loss / 2).backward()", "step": f"if i % 2:\n            {STEP}"},
    "two losses": {
        "backward": "loss.backward(retain_graph=True); (0.1 * second.bias.square().sum() * loss).backward()"
    },
    "losses before": {
        "forward": "out = second(first(x)); loss = criterion(out, y); other = 0.1 * out.square().mean()",
        "backward": "loss.backward(retain_graph=True); other.backward()",
    },
    "clamped": {"step": f"{STEP}; second.weight.data.clamp_(-0.1, 0.1)"},
}


def joint(folder: Path, parts: dict[str, str]) -> Path:
    """Write a script with some parts."""
    parts = {"model": MODEL, "optimizer": OPTIMIZERS, "step": STEP, "forward": FORWARD, **parts}
    parts["optimizer"] += "everything = [*first.parameters(), *second.parameters()]\n"
    parts["optimizer"] += "schedulers = rates() if 'rates' in globals() else []"
    path = script(folder, **parts)
    path.write_text(path.read_text().replace("(50", "(48").replace("model.train()", "first.train()"))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_written_files_are_the_script(tmp_path: Path, variant: str) -> None:
    path = joint(tmp_path, VARIANTS[variant])
    result = written_port(path, 9)
    training = result.training
    assert [type(part.optimizer).__name__ for part in training.parts] == ["SGD", "Adam"]
    assert (training.loader is None) == (variant in ("rates", "two losses", "losses before"))
    assert (tmp_path / INPUTS).exists() == (training.loader is None)
    proof = prove(result, tmp_path, "joint")
    assert proof.passed, proof.lines
    with changed(tmp_path / "run.py", "momentum=0.9", "momentum=0.91"):
        assert not prove(result, tmp_path, "joint").passed


@pytest.mark.parametrize(
    ("parts", "problem", "line"),
    [
        (
            {"step": "optimizers[0].step()\n        if i % 2:\n            optimizers[1].step()"},
            "together in some",
            "SGD",
        ),
        ({"step": "[optimizers[0].step() for _ in range(2)]"}, "SGD.step.. without backward", "step() for"),
        (
            {"backward": "loss.backward(); nn.utils.clip_grad_norm_([first[0].weight, second.weight], 0.05)"},
            "some of the trained parameters are clipped",
            "clip_grad_norm_",
        ),
    ],
)
def test_other_steps_are_refused_by_line(tmp_path: Path, parts: dict[str, str], problem: str, line: str) -> None:
    path = joint(tmp_path, parts)
    with pytest.raises(UserError, match=problem) as error:
        understood(record(path, [], 9))
    assert line_of(path, line) in str(error.value)
