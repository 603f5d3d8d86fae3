"""The selftest passes on a correct machine, needs no PyTorch, and detects each fault that it checks."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtrain.step.loss_program
import jaxtrain.step.loss_scale
import jaxtrain.step.step
from jaxtrain.passes import remat
from jaxtrain.passes.policies import POLICIES
from jaxtrain.step import Loss
from parity import selftest
from parity.cli import main
from parity.record import Record, Snapshot
from parity.selftest import checkpoint_check, collectives_check, gpt2_check, products_check, step_check
from parity.selftest.check_result import CheckResult
from parity.sides import jax_side

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocker())
from parity.cli import main
sys.exit(main(["selftest", *sys.argv[1:]]))
"""
NOT_NEEDED = {
    *("torch", "transformers", "grain", "safetensors", "tensorboardX", "sklearn", "PIL", "matplotlib"),
    *("jinja2", "equinox", "pyarrow", "onnx", "pytest"),
}


def run_selftest(blocked: set[str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED.replace("{blocked}", repr(blocked)), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def failed(findings: list[CheckResult]) -> set[str]:
    return {finding.name for finding in findings if finding.passed is False}


def found(check: Callable[[], Any]) -> list[CheckResult]:
    findings = list(check())
    assert findings
    return findings


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_check, "DEEP_ROWS", 64)


# Results of a correct machine.


@pytest.mark.parametrize(
    "check",
    [
        products_check.products,
        products_check.convolutions,
        step_check.overflow,
        step_check.accumulation,
        step_check.rematerialization,
    ],
)
def test_checks_pass_on_a_correct_machine(check: Callable[[], Any]) -> None:
    findings = found(check)
    assert {finding.passed for finding in findings} == {True}, findings


def test_checkpoint_and_collectives_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    right, saved = checkpoint_check.round_trip, []

    def round_trip(state: Any) -> Any:
        saved.append(jax.tree.map(np.array, state.opt_state[0].mu))
        return right(state)

    monkeypatch.setattr(checkpoint_check, "round_trip", round_trip)
    for check in (checkpoint_check.checkpoint, collectives_check.collectives):
        assert {finding.passed for finding in found(check)} == {True}
    # The gradient of the one update before was clipped to the norm 1.
    (mu,) = saved
    assert math.sqrt(sum((x**2).sum() for x in mu.values())) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.nightly
def test_the_command_passes_with_the_frameworks_alone(tmp_path: Path) -> None:
    done = run_selftest(NOT_NEEDED, "--json", str(tmp_path / "found.json"), "--debug")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["failed"] == 0
    assert written["passed"] == sum(check["passed"] is True for check in written["checks"])
    assert {check["passed"] for check in written["checks"]} <= {True, None}
    assert all(check["figure"] <= check["bound"] for check in written["checks"] if check["bound"] is not None)
    assert {"GPT-2, fp64, first step", "GPT-2, fp16, 5 steps", "determinism"} <= {c["name"] for c in written["checks"]}
    assert "torch" not in written["environment"]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("PASS  ") for line in lines) == written["passed"]


def test_half_of_the_hidden_values_are_dropped_if_there_is_a_key() -> None:
    ones: Any = {
        "inner": 9 * np.eye(step_check.WIDTH),
        "outer": np.ones((step_check.WIDTH, 1)),
    }  # all hidden values are 1
    batch = {"x": np.ones((400, step_check.WIDTH)), "y": np.zeros(400), "weight": np.ones(400)}
    (whole, _), (dropped, _) = (step_check.squared_error(ones, batch, rng) for rng in (None, jax.random.key(0)))
    assert whole.total / whole.weight == pytest.approx(step_check.WIDTH**2)
    # Half of the values are kept: the mean of a binomial number's square.
    assert dropped.total / dropped.weight == pytest.approx(step_check.WIDTH**2 / 4 + step_check.WIDTH / 4, rel=0.1)


def test_updates_are_changes_of_the_parameters() -> None:
    # Their distances are relative to the changes, not to the parameters.
    batch = {"x": np.array([1.0, 2.0, 5.0]), "weight": np.ones(3)}
    loss_fn = lambda params, batch, rng: (Loss((params["w"] * batch["x"]).sum(), batch["weight"].sum()), {})  # noqa: E731
    changes, _ = step_check._update(loss_fn, {"w": np.full((), 1000.0)}, batch)
    assert changes["w"] == pytest.approx(-8 / 3, rel=1e-12)


# The command.


def test_the_first_line_is_printed_before_jax_is_imported() -> None:
    # Missing as if not installed: an importer of this program's own would be the user's line at fault.
    program = "import sys; sys.modules['jax'] = None; from parity.cli import main; sys.exit(main(['selftest']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("checking whether this machine trains correctly")
    assert done.returncode == 1
    assert "ModuleNotFoundError: import of jax" in done.stderr


def test_a_missing_gpu_or_driver_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["selftest", "--device", "gpu", "--json", str(tmp_path / "found.json")]) == 1
    assert "FAIL  devices                     JAX found no gpu" in capsys.readouterr().out
    written = json.loads((tmp_path / "found.json").read_text())
    assert (written["passed"], written["failed"]) == (0, 1)
    assert written["environment"]["jax"] == jax.__version__
    for message, detail in (("no driver\nthat responds", "no driver"), ("", "")):

        def unavailable(message: str = message) -> Any:
            raise RuntimeError(message)

        monkeypatch.setattr(jax, "local_devices", unavailable)
        assert main(["selftest", "--json", str(tmp_path / "found.json")]) == 1
        written = json.loads((tmp_path / "found.json").read_text())
        (check,) = written["checks"]
        assert (check["name"], check["passed"], check["detail"]) == ("devices", False, detail)
        assert written["environment"].keys() == {"python", *selftest.PACKAGES}


def test_a_check_that_raises_fails_and_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives_check, "COLLECTIVES", {"psum": lambda x: x @ x[:3]})
    monkeypatch.setattr(selftest, "CHECKS", ("collectives_check.collectives", "step_check.accumulation"))
    assert main(["selftest", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("FAIL  collectives                 TypeError: ")
    assert lines[3].startswith("PASS  accumulation")
    assert lines[4].startswith("1 passed, 1 failed in ")


def test_a_nonfinite_figure_fails_and_is_null(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(products_check, "ROUNDOFF", {"fp32": 0.0})
    monkeypatch.setattr(products_check, "policy", lambda name: Rounded(lambda x: x * jnp.float32(np.nan)))
    monkeypatch.setattr(selftest, "CHECKS", ("products_check.products",))
    assert main(["selftest", "--json", str(tmp_path / "found.json")]) == 1
    (expected,) = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert (expected["passed"], expected["figure"]) == (False, None)
    assert "FAIL  product, fp32" in capsys.readouterr().out


# Faults.


class Rounded:
    """A policy that applies a function to the operands."""

    def __init__(self, operand: Callable[[Any], Any]) -> None:
        self.operand = operand

    def apply(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: operation(*map(self.operand, args))


@pytest.mark.parametrize("check", [products_check.products, products_check.convolutions])
@pytest.mark.parametrize(
    ("precision", "coarser"),
    [
        ("fp32", lambda x: lax.reduce_precision(x, 8, 10)),  # tf32 for float32
        ("tf32", lambda x: lax.reduce_precision(x, 8, 7)),  # bf16 for tf32
        ("fp16", lambda x: lax.reduce_precision(x, 8, 7).astype(jnp.float16)),  # bf16 for fp16
        ("bf16", lambda x: lax.reduce_precision(x, 8, 4).astype(jnp.bfloat16)),  # an 8-bit format for bf16
        ("bf16", lambda x: x),  # float32 for bf16
    ],
)
def test_products_of_another_precision_are_detected(
    check: Callable[[], Any], precision: str, coarser: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_check, "ROUNDOFF", {precision: products_check.ROUNDOFF[precision]})
    monkeypatch.setattr(products_check, "policy", lambda name: Rounded(coarser))
    (finding,) = check()
    assert finding.passed is False


def wrong_growth(scale: jax.Array, factor: float) -> jax.Array:
    return scale * np.float32(3.0 if factor > 1 else factor)


@pytest.mark.parametrize(
    ("module", "name", "broken", "seen"),
    [
        (jaxtrain.step.loss_scale, "_multiply", wrong_growth, {"loss scale"}),
        (jaxtrain.step.step, "_restore_if", lambda skip, old, new: new, {"overflow, skipped update"}),
        # After the first NaN in the parameters, every update is skipped.
        (
            jaxtrain.step.step,
            "found_inf",
            lambda state: jnp.array(False),
            {"overflow, detection", "overflow, skipped update"},
        ),
        (jaxtrain.step.loss_scale, "all_finite", lambda *grads: jnp.array(True), {"overflow, detection", "loss scale"}),
    ],
    ids=["growth", "skip", "flag", "detection"],
)
def test_a_broken_loss_scale_is_detected(
    module: Any, name: str, broken: Any, seen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert failed(found(step_check.overflow)) >= seen


def test_micro_batches_averaged_without_their_weights_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jaxtrain.step.step.add_micro_batch

    def equal(window: Any, grads: Any, loss: Any, k: Any, observed: Any) -> Any:
        return right(window, grads, loss._replace(weight=jnp.full_like(loss.weight, 4.0)), k, observed)

    monkeypatch.setattr(jaxtrain.step.step, "add_micro_batch", equal)
    (finding,) = step_check.accumulation()
    assert finding.passed is False


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        (lambda fn, policy, platform: fn, {"rematerialization, memory"}),
        (
            lambda fn, policy, platform: fn if policy == "none" else partial(_with_another_key, remat(fn, policy)),
            {"rematerialization, update"},
        ),
    ],
    ids=["memory", "numbers"],
)
def test_broken_rematerialization_is_detected(broken: Any, seen: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtrain.step.loss_program, "remat", broken)
    assert failed(found(step_check.rematerialization)) == seen


def _with_another_key(fn: Any, params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
    return fn(params, batch, jax.random.fold_in(rng, 1), model_state)


def test_a_checkpoint_that_loses_a_bit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checkpoint_check.round_trip

    def corrupted(state: Any) -> Any:
        back = right(state)
        one_ulp = {**back.params, "outer": jnp.nextafter(back.params["outer"], jnp.float32(np.inf))}
        return back._replace(params=one_ulp)

    monkeypatch.setattr(checkpoint_check, "round_trip", corrupted)
    assert failed(found(checkpoint_check.checkpoint)) == {"checkpoint, restored", "checkpoint, 2 steps on"}
    monkeypatch.setattr(checkpoint_check, "round_trip", lambda state: right(state)._replace(rng=jax.random.key(8)))
    assert failed(found(checkpoint_check.checkpoint)) == {"checkpoint, restored", "checkpoint, 2 steps on"}


def test_a_device_that_adds_wrongly_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_psum(x: Any) -> Any:
        return lax.psum(x, "devices") - (lax.axis_index("devices") == 2).astype(x.dtype)

    monkeypatch.setattr(collectives_check, "COLLECTIVES", {**collectives_check.COLLECTIVES, "psum": wrong_psum})
    findings = found(collectives_check.collectives)
    assert failed(findings) == {"psum, 4 devices"}
    assert findings[0].detail == f"wrong on {jax.devices()[2]}"


def run_off_by(*distance: float) -> Callable[..., Record]:
    """Return a run that is off from PyTorch's float64 run by multiples of PyTorch's own distances, in fp64 of 1e-16."""

    def run(case: Any, weights: Any, precision: str, *, steps: int) -> Record:
        truth = {what: gpt2_check.recorded(what) for what in gpt2_check.GROUPS}
        low = precision in gpt2_check.LOW
        apart = gpt2_check.recorded("distances")[precision] if low else np.full(3, 1e-16)
        perturbed = {}
        for off, (what, tensors) in zip(apart * np.array(distance), truth.items(), strict=True):
            size = sum(x.size for x in tensors.values())
            perturbed[what] = {name: x + off / size**0.5 for name, x in tensors.items()}
        losses, grads, params = perturbed.values()
        scales = gpt2_check.recorded("scales")[precision] if low else np.ones(steps + 1)
        last = Snapshot(params, {}, {})
        return Record(
            np.array([losses[str(i)] for i in range(1, steps + 1)]), grads, last, last, scales, np.ones(steps)
        )

    return run


def test_a_run_is_judged_by_pytorchs_distance_to_the_float64_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_side, "run", run_off_by(1.9))
    assert failed(found(gpt2_check.precision)) == set()
    monkeypatch.setattr(jax_side, "run", run_off_by(2.1))
    assert failed(found(gpt2_check.precision)) == {f"GPT-2, {low}, 5 steps" for low in gpt2_check.LOW}
    # The bar of the losses is wider, as they are few; in fp32 the distance is at least one rounding.
    monkeypatch.setattr(jax_side, "run", run_off_by(5.0, 1.0, 1.0))
    assert failed(found(gpt2_check.precision)) == set()
    monkeypatch.setattr(jax_side, "run", run_off_by(6.0, 1.0, 1.0))
    assert failed(found(gpt2_check.precision)) == {"GPT-2, bf16, 5 steps", "GPT-2, fp16, 5 steps"}
    for off in ((1.0, 2.1, 1.0), (1.0, 1.0, 2.1)):
        monkeypatch.setattr(jax_side, "run", run_off_by(*off))
        assert failed(found(gpt2_check.precision)) == {f"GPT-2, {low}, 5 steps" for low in gpt2_check.LOW}
    monkeypatch.setattr(jax_side, "run", run_off_by(np.nan))
    assert len(failed(found(gpt2_check.precision))) == 5

    def overflowed(*args: Any, **kwargs: Any) -> Record:
        run = run_off_by(1.0)(*args, **kwargs)
        return replace(run, scales=run.scales / 2)

    monkeypatch.setattr(jax_side, "run", overflowed)
    assert failed(found(gpt2_check.precision)) == {f"GPT-2, {low}, 5 steps" for low in gpt2_check.LOW}


def test_a_run_in_another_precision_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2_check, "LOW", ("fp32",))
    monkeypatch.setitem(POLICIES, "fp32", POLICIES["bf16"])
    assert failed(found(gpt2_check.precision)) == {"GPT-2, fp32, 5 steps"}


def test_a_layer_norm_of_another_epsilon_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2_check, "LOW", ())
    monkeypatch.setattr(gpt2_check, "CONFIG", replace(gpt2_check.CONFIG, layer_norm_epsilon=1e-6))
    assert failed(found(gpt2_check.precision)) == {"GPT-2, fp64, first step", "GPT-2, fp64, 5 steps"}


def test_a_nondeterministic_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = gpt2_check.loss_of, iter(range(100))

    def nondeterministic(config: Any) -> Any:
        loss_fn = right(config)

        def noisy(params: Any, batch: Any, rng: Any) -> Any:
            loss, metrics = loss_fn(params, batch, rng)
            shape = jax.ShapeDtypeStruct((), np.float32)
            noise = jax.pure_callback(lambda: np.float32(1 + 1e-3 * next(calls)), shape)
            return loss._replace(total=loss.total * noise), metrics

        return noisy

    monkeypatch.setattr(gpt2_check, "loss_of", nondeterministic)
    (finding,) = gpt2_check.determinism()
    assert finding.passed is False
    assert "--xla_gpu_deterministic_ops=true" in finding.detail


@pytest.mark.nightly
def test_pytorch_reproduces_the_recorded_run(tmp_path: Path) -> None:
    from parity.selftest.record_reference import record

    record(tmp_path / "again.npz")
    with np.load(gpt2_check.RECORDED) as kept, np.load(tmp_path / "again.npz") as again:
        assert set(kept.files) == set(again.files)
        for name in kept.files:
            what = name.partition("/")[0]
            if what == "distances":  # of rounding errors, which depend on the processor
                assert (np.abs(np.log2(again[name] / kept[name])) < 1).all(), name
            elif what in gpt2_check.GROUPS:
                np.testing.assert_allclose(again[name], kept[name], rtol=1e-11, atol=1e-13, err_msg=name)
            else:
                np.testing.assert_array_equal(again[name], kept[name], err_msg=name)
