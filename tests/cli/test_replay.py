"""`jaxtrain replay` on failed and on finite runs."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import Loss
from jaxtrain.cli import main
from jaxtrain.recipes.image import ImageRecipe

from ..runner.test_guards import RECIPE, scale_images
from .conftest import TINY_GPT

SMALL = "--hidden 8 --batch-size 8 --log-every 1 --eval-every 40 --save-every 5 --steps 12"


def run(command: str) -> int:
    return main(command.split())


def lines(folder: str) -> dict[int, dict]:
    read = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in read}


def replayed(capsys, command: str, status: int) -> str:
    capsys.readouterr()
    assert run(f"replay {command}") == status
    return capsys.readouterr().out


def printed_losses(out: str) -> list[float]:
    own = next(line for line in out.splitlines() if line.startswith("loss"))
    wide = next(line for line in out.splitlines() if line.endswith("in float64"))
    return [float(own.split()[1]), float(wide.split()[0])]


@pytest.mark.parametrize(
    "precision", ["fp16", "bf16_params_kahan", "fp32", "bf16", "fp8_delayed --hidden 16 --fp8-exclude layers/1/*"]
)
@jax.numpy_dtype_promotion("standard")  # as in a user's process: the loss of a model in bfloat16 has weights in float32
def test_a_finite_step_has_the_logged_loss(precision, capsys):
    assert run(f"train digits-mlp {SMALL} --accumulate 2 --precision {precision} --out run") == 0
    for step in (1, 12):
        out = replayed(capsys, f"run {step}", 0)
        assert "all values are finite" in out
        own, wide = printed_losses(out)
        assert own == float(f"{lines('run')[step]['loss']:.7g}")
        assert wide == pytest.approx(own, rel=1e-6 if precision == "fp32" else 1e-2)
    assert "starting at step 10: 1 steps to rerun before step 12" in out


def test_a_replayed_step_draws_the_same_dropout_mask(text_folder, capsys):
    command = f"train gpt-stdlib {TINY_GPT} --data {text_folder} --dropout 0.5 --accumulate 2 --steps 2 --log-every 1"
    assert run(f"{command} --out run") == 0
    own, wide = printed_losses(replayed(capsys, "run 2", 0))
    # Different dropout masks would change the loss far more than rounding does.
    assert wide == pytest.approx(own, rel=1e-6)
    assert own == float(f"{lines('run')[2]['loss']:.7g}")


def test_an_overflow_is_attributed_to_the_runs_precision(capsys):
    assert run(f"train digits-mlp {SMALL} --lr 1e30 --clip-norm None --warmup-steps 0 --out run") == 1
    assert "jaxtrain replay run 2" in capsys.readouterr().err
    out = replayed(capsys, "run 2", 1)
    assert "nan in fp32, bit-identical to the run" in out
    assert "finite in float64: fp32 overflows" in out
    assert "arises        dot_general -> float32[8, 10]" in out
    assert "jaxtrain/models/mlp.py:" in out
    assert "forward       the loss, the gradient of layers/0/" in out


def with_added_loss(added):
    """Return a method `task` whose loss adds `added(params)`."""
    original = ImageRecipe.task

    def patched(recipe):
        task = original(recipe)

        def loss_fn(params, batch, rng):
            loss, metrics = task.loss_fn(params, batch, rng)
            return Loss(loss.total + added(params), loss.weight), metrics

        return dataclasses.replace(task, loss_fn=loss_fn)

    return patched


def root_of_bias(params):
    return jnp.sum(jnp.sqrt(0.0 * params["layers"][1]["bias"] ** 2))


def test_a_nonfinite_gradient_is_reported_with_its_source_line(capsys, monkeypatch):
    monkeypatch.setattr(ImageRecipe, "task", with_added_loss(root_of_bias))
    assert run(f"train digits-mlp {SMALL} --accumulate 2 --out run") == 1
    message = capsys.readouterr().err
    assert "step 1: the loss is 2." in message
    out = replayed(capsys, "run 1", 1)
    assert "not finite in float64 either:" in out
    assert 'return jnp.sum(jnp.sqrt(0.0 * params["layers"][1]["bias"] ** 2))' in out
    assert "arises        div" in out
    assert "backward      the gradient of layers/1/bias, micro-batch 0" in out


def test_the_recorded_batch_is_replayed_after_the_data_have_changed(capsys, monkeypatch):
    changed = scale_images(monkeypatch, {8: float("nan")})
    assert run(f"train digits-mlp {SMALL} --out run") == 1
    changed.factors.clear()
    out = replayed(capsys, "run 8", 1)
    assert "the data have changed since the run" in out
    assert ", bit-identical to the run" in out
    assert "input         batch/image: float64[8, 8, 8, 1], 64 NaN, else 0 to 1" in out
    Path("run/replay/step-8.npz").write_bytes(b"PK\x03\x04 cut")
    assert run("replay run 8") == 2
    assert "run/replay/step-8.npz cannot be read" in capsys.readouterr().err
    Path("run/replay/step-8.npz").unlink()
    replayed(capsys, "run 7", 0)


def test_steps_after_a_rollback_are_replayed_with_their_original_batches(capsys, monkeypatch):
    scale_images(monkeypatch, {23: 3e3}, dataclasses.replace(RECIPE, lr=1e-3))
    command = f"train digits-mlp {SMALL} --lr 1e-3 --spike-factor 30 --on-spike rollback --out run"
    assert run(command.replace("--steps 12", "--steps 28 --keep-last 9")) == 0
    assert lines("run")[21]["batches_skipped"] == 3
    for step in (20, 21, 24, 27):
        own, _ = printed_losses(replayed(capsys, f"run {step}", 0))
        assert own == float(f"{lines('run')[step]['loss']:.7g}")


def test_invalid_steps_are_rejected(capsys):
    assert run(f"train digits-mlp {SMALL} --out run") == 0
    for command, message in {
        "replay": "a run folder and a step are required",
        "replay run": "a run folder and a step are required",
        "replay run 0": "STEP must be a positive integer, got '0'",
        "replay run x": "STEP must be a positive integer, got 'x'",
        "replay run 13": "STEP must be at most 12, the last step of run, got 13",
        "replay nowhere 1": "nowhere holds no run",
    }.items():
        assert run(command) == 2
        assert message in capsys.readouterr().err
    before = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*")}
    assert run("replay run 3") == 0
    assert {p: p.stat().st_mtime_ns for p in Path("run").rglob("*")} == before
