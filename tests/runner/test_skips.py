"""A run whose fp16 gradients overflow prints a warning and fails."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest

from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES
from jaxtrain.runner import preflight
from jaxtrain.runner.fetched_batches import DispatchedStep, FetchedBatch
from jaxtrain.runner.stops.guards import Guard
from tests.runner.recording import train

# After one update at this rate, no gradient is finite.
OVERFLOWING = dataclasses.replace(
    RECIPES["digits-mlp"], hidden=8, batch_size=8, precision="fp16", lr=1e9, warmup_steps=0, log_every=4, max_skips=13
)
FAILS_AT = 1 + OVERFLOWING.max_skips


def saved_steps(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overflowing") / "run"
    return folder, *train(folder, OVERFLOWING)


def test_a_run_that_only_skips_fails_with_one_line(overflowing):
    _, _, error = overflowing
    step = int(error.split(":")[0].removeprefix("step "))
    assert step in (FAILS_AT, FAILS_AT + 1)
    scale = 65536 * 0.5 ** (step - 1)
    for part in (
        "13 updates in a row were skipped",
        f"loss scale {scale:g},",
        "first in layers/",
        "micro-batch 0;",
        "lower --lr",
        "bf16",
    ):
        assert part in error
    assert "\n" not in error


def test_the_last_state_is_saved_and_logged(overflowing):
    folder, _, error = overflowing
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"step {last['step']}:" in error
    assert saved_steps(folder)[-1] == last["step"]


def test_a_low_loss_scale_gives_one_warning(overflowing):
    warnings = [m for m in overflowing[1] if "warning" in m]
    # Step 5 ran at a scale of 4096, and step 9, the first of the next log interval, at 256.
    assert len(warnings) == 1
    assert "step 12: the loss scale stayed at 512 or below" in warnings[0]
    for part in ("--lr", "a mean and not a sum", "bf16"):
        assert part in warnings[0]


def test_a_resumed_run_continues_to_count_skips(overflowing, tmp_path):
    folder = shutil.copytree(overflowing[0], tmp_path / "run")
    step = saved_steps(folder)[-1]
    _, error = train(folder, dataclasses.replace(OVERFLOWING, max_skips=step + 3), resume=True)
    assert f"{step + 3} updates in a row" in error
    assert saved_steps(folder)[-1] in (step + 4, step + 5)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_healthy_run_has_no_warnings(precision, tmp_path):
    recipe = dataclasses.replace(OVERFLOWING, lr=1e-3, precision=precision, steps=6, max_skips=3)
    messages, error = train(tmp_path / "run", recipe)
    assert error is None
    assert not [m for m in messages if "warning" in m]


def guard(max_skips, skips=0):
    found = Guard(dataclasses.replace(OVERFLOWING, max_skips=max_skips), {"a": jnp.ones(1)})
    found.restore(None, skips=skips)
    return found


def step(skipped):
    scalars = {"loss": 1.0, "nonfinite_micro_batch": -1, "nonfinite_leaf": -1, "skipped": skipped}
    return DispatchedStep(1, FetchedBatch({}, 1), {name: jnp.asarray(x) for name, x in scalars.items()})


@pytest.mark.parametrize("settle_every", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("pattern", "before", "stuck"),
    [
        ("sss", 0, True),
        ("sscss", 0, False),
        ("csscsssc", 0, True),
        ("ss", 1, True),
        ("c", 5, False),
        ("cs", 5, False),
        ("s", 5, True),
    ],
)
def test_only_consecutive_skips_count_at_any_logging_interval(pattern, before, stuck, settle_every):
    counting = guard(3, skips=before)
    for i, event in enumerate(pattern, 1):
        counting.add(step(event == "s"))
        if i % settle_every == 0 or i == len(pattern):
            counting.settle()
    assert counting.reached_skip_limit is stuck


class Pending:
    """A value of an unfinished step: its transfer may be started but not awaited."""

    def copy_to_host_async(self):
        pass

    def __array__(self, *args, **kwargs):
        pytest.fail("waited for the newest step")


def test_counting_never_waits_for_the_newest_step():
    counting = guard(1)
    counting.add(step(True))
    assert counting.reached_skip_limit is False
    counting.add(dataclasses.replace(step(True), metrics={**step(True).metrics, "skipped": Pending()}))
    assert counting.reached_skip_limit is True


@pytest.mark.parametrize("max_skips", [0, -1])
def test_max_skips_below_one_is_refused(max_skips):
    with pytest.raises(UserError, match=f"max_skips must be at least 1, got {max_skips}"):
        preflight.check_settings(dataclasses.replace(OVERFLOWING, max_skips=max_skips))
