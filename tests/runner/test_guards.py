"""Guards end a run before an invalid state is saved: inf and NaN, loss spikes, memory; and stalled input."""

import dataclasses
import json
import math
import signal
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.loader import Loader
from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES
from jaxtrain.recipes.command import command
from jaxtrain.runner import interval, start
from jaxtrain.runner.checkpoint import restore_params, saved_steps
from jaxtrain.runner.fetched_batches import Batches, DispatchedStep, FetchedBatch
from jaxtrain.runner.preflight import check_settings
from jaxtrain.runner.recipe_step import training_step
from jaxtrain.runner.stops.guards import FEWEST, MOST_ROLLBACKS, Guard, RunInvalid, Spike, read_batch
from jaxtrain.runner.stops.out_of_memory import flags_for_less_memory
from tests.runner import recording

RECIPE = dataclasses.replace(
    RECIPES["digits-mlp"], hidden=8, batch_size=8, lr=1e-3, log_every=7, eval_every=40, save_every=5, steps=30
)


class Changed:
    """A source with some examples multiplied by a factor."""

    def __init__(self, source, factors):
        self.source, self.factors = source, factors

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        example = self.source[index]
        return {**example, "image": example["image"] * np.float32(self.factors.get(index, 1))}


class Numbers:
    """A source whose examples are their indices."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"index": np.int32(index)}


def scale_images(monkeypatch, factors, recipe=RECIPE):
    """Scale the image of the first example in the batches of these steps of the first epoch."""
    task = recipe.task()
    order = Loader(Numbers(len(task.train)), recipe.batch_size, recipe.seed)
    first = {step: int(next(order)["index"][0]) for step in range(1, 1 + max(factors))}
    changed = Changed(task.train, {first[step]: factor for step, factor in factors.items()})
    changed_task = dataclasses.replace(task, train=changed)
    monkeypatch.setattr(type(recipe), "task", lambda recipe: changed_task)
    return changed


def train(folder, recipe=RECIPE, **how):
    return recording.train(folder, recipe, **how)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(line):
    timed = ("step_time_s", "examples_per_s", "peak_memory_bytes", "input_wait_s")
    return {name: x for name, x in line.items() if name not in timed}


def finite(folder):
    params = restore_params(folder / "checkpoints", RECIPE.task().params)
    return all(np.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("precision", "save_every", "log_every"),
    [("fp32", 5, 7), ("fp32", 12, 7), ("bf16", 5, 12)],
    ids=["found by the next step", "by its save", "by its line"],
)
def test_an_applied_nan_ends_the_run_before_it_is_saved(precision, save_every, log_every, tmp_path, monkeypatch):
    changed = scale_images(monkeypatch, {12: math.nan})
    recipe = dataclasses.replace(RECIPE, precision=precision, save_every=save_every, log_every=log_every, keep_last=1)
    _, error = train(tmp_path / "run", recipe)
    for part in (
        "step 12: the loss is nan and its gradient has its first inf or NaN in layers/0/",
        "micro-batch 0",
        f"the checkpoint of step {12 - 1 - 11 % save_every} is valid",
        f"jaxtrain replay {tmp_path / 'run'} 12 ",
    ):
        assert part in error
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1:] == [10 if save_every == 5 else 0]
    assert finite(tmp_path / "run")
    assert max(line["step"] for line in lines(tmp_path / "run")) < 12
    batch, metrics, event = read_batch(tmp_path / "run" / "replay", 12)
    data = Loader(changed, recipe.batch_size, recipe.seed)
    expected = [next(data) for _ in range(12)][-1]
    jax.tree.map(np.testing.assert_array_equal, batch, expected)
    assert np.isnan(metrics["loss"])
    assert event is None


def test_a_nan_in_fp16_only_skips_the_update(tmp_path, monkeypatch):
    scale_images(monkeypatch, {12: math.nan})
    recipe = dataclasses.replace(RECIPE, precision="fp16", steps=15)
    assert train(tmp_path / "run", recipe)[1] is None
    assert sum(line.get("skipped", 0) for line in lines(tmp_path / "run")) == 1
    assert finite(tmp_path / "run")


def dispatched(step, loss=1.0, leaf=-1, skipped=False):
    scalars = {"loss": np.float32(loss), "nonfinite_leaf": np.int32(leaf), "nonfinite_micro_batch": np.int32(leaf)}
    metrics = {name: jnp.asarray(x) for name, x in {**scalars, "skipped": np.bool_(skipped)}.items()}
    return DispatchedStep(step, FetchedBatch({"x": np.zeros(1)}, step), metrics)


PARAMS = {"a": jnp.ones(2), "b": jnp.ones(3)}


def guard(**settings):
    return Guard(dataclasses.replace(RECIPE, **settings), PARAMS)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (dispatched(1, math.inf), "the loss is inf and its gradient is finite"),
        (dispatched(1, 2.0, leaf=1), "the loss is 2 and its gradient has its first inf or NaN in b, micro-batch 1"),
        (
            dispatched(1, math.nan, leaf=0),
            "the loss is nan and its gradient has its first inf or NaN in a, micro-batch 0",
        ),
        (dispatched(1, math.nan, leaf=0, skipped=True), None),
        (dispatched(1), None),
    ],
)
def test_the_error_gives_the_reason_of_an_invalid_step(step, reason):
    checked = guard()
    checked.add(step)
    if reason is None:
        checked.settle()
        return
    with pytest.raises(RunInvalid, match=reason):
        checked.settle()
    checked.settle()  # it is raised once


class Pending:
    """A value of an unfinished step: its transfer may be started but not awaited."""

    def copy_to_host_async(self):
        pass

    def __array__(self, *args, **kwargs):
        pytest.fail("waited for the newest step")


def test_checking_never_waits_for_the_newest_step():
    checked = guard()
    checked.add(dispatched(1))
    checked.add(dataclasses.replace(dispatched(2), metrics=dict.fromkeys(dispatched(2).metrics, Pending())))


@pytest.mark.parametrize("part", ["params", "opt_state", "model_state", "ema"])
def test_a_nonfinite_state_is_not_saved(part):
    step = training_step(
        dataclasses.replace(RECIPE, schedule="constant"),
        SimpleNamespace(loss_fn=lambda *_: None, frozen=None, no_decay=None),
    )
    state = step.init(PARAMS, model_state={"mean": jnp.zeros(2)})._replace(ema=PARAMS)
    checked = guard()
    checked.add(dispatched(7))
    checked.check(state)
    named, at = jax.tree.flatten(getattr(state, part))
    last = max(i for i, x in enumerate(named) if x.ndim)
    named[last] = named[last].at[0].set(jnp.inf)
    checked.add(dispatched(8))
    with pytest.raises(RunInvalid, match=f"^{part}/.* holds inf or NaN, though loss and gradient were finite") as error:
        checked.check(state._replace(**{part: jax.tree.unflatten(at, named)}))
    assert error.value.step.step == 8


def spikes(losses, factor=3.0, checked=None):
    checked = checked or guard(spike_factor=factor)
    found = []
    for i, loss in enumerate(losses):
        try:
            checked.add(dispatched(i, loss))
        except Spike as spike:
            found.append(spike.step.step)
    return found


def test_a_spike_is_a_loss_above_the_running_median():
    calm = [2.0, 1.0] * (FEWEST // 2)  # their median is 1.5
    assert spikes([*calm, 4.4, 1.0]) == []
    assert spikes([*calm, 4.6, 1.0]) == [FEWEST]
    assert spikes([*calm[1:], 4.6, 1.0]) == []  # too few losses
    assert spikes([*calm, *[1.0] * 63, 3.1, 1.0]) == [FEWEST + 63]  # the median follows
    assert spikes([*calm, 100.0, 1.0], factor=None) == []


def test_a_restored_guard_gives_the_same_result():
    losses = [1.0] * FEWEST
    before = guard(spike_factor=3.0)
    assert spikes(losses, checked=before) == []
    before.settle()
    after = guard(spike_factor=3.0)
    after.restore(json.loads(json.dumps(before.state())))
    assert spikes([3.1, 1.0], checked=after) == [0]


@pytest.mark.parametrize(
    ("factor", "error"),
    [
        *((factor, f"spike_factor must be > 1, for example 10, got {factor}$") for factor in (1.0, 0.0, -2.0)),
        *((factor, f"^spike_factor must be a finite float or None, got {factor}$") for factor in (math.nan, math.inf)),
    ],
)
def test_an_invalid_spike_factor_is_an_error(factor, error):
    with pytest.raises(UserError, match=error):
        check_settings(dataclasses.replace(RECIPES["digits-mlp"], spike_factor=factor))


ROLLBACK = dataclasses.replace(RECIPE, spike_factor=30.0, on_spike="rollback", log_every=2)


def test_a_spike_stops_the_run_by_default(tmp_path, monkeypatch):
    scale_images(monkeypatch, {23: 3e3})
    _, error = train(tmp_path / "run", dataclasses.replace(ROLLBACK, on_spike="stop"))
    assert error.startswith("step 23: the loss is ")
    assert "more than 30 times " in error
    assert "the checkpoint of step 20 is valid" in error


def test_a_run_rolls_back_past_a_spike_and_again_when_resumed(tmp_path, monkeypatch):
    scale_images(monkeypatch, {23: 3e3})
    messages, error = train(tmp_path / "whole", ROLLBACK)
    assert error is None
    assert [
        m
        for m in messages
        if "rolled back to step 20, skipping 3 batches" in m and m.startswith("step 23: the loss is")
    ]
    whole = lines(tmp_path / "whole")
    assert [line["step"] for line in whole] == [0, *range(2, 21, 2), 21, *range(22, 31, 2)]
    events = [line for line in whole if "batches_skipped" in line]
    assert [(e["step"], e["rolled_back_from"], e["rolled_back_to"], e["batches_skipped"]) for e in events] == [
        (21, 23, 20, 3)
    ]
    assert events[0]["spike_loss"] > 30 * whole[-1]["loss"]
    saved = json.loads((tmp_path / "whole/checkpoints/30/run.json").read_text())["data"]
    assert saved["next_batch"] == 33

    # Stopped by a signal one step before the spike: the run must not roll back to that stop's checkpoint.
    add, seen = interval.Interval.add, []

    def stopping(self, metrics):
        seen.append(metrics)
        if len(seen) == 22:
            signal.raise_signal(signal.SIGINT)
        add(self, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(interval.Interval, "add", stopping)
        train(tmp_path / "stopped", ROLLBACK)
    assert max(saved_steps(tmp_path / "stopped/checkpoints")) == 22
    assert train(tmp_path / "stopped", ROLLBACK, resume=True)[1] is None
    assert [*map(untimed, lines(tmp_path / "stopped"))] == [*map(untimed, whole)]
    like = ROLLBACK.task().params
    both = [restore_params(tmp_path / name / "checkpoints", like) for name in ("whole", "stopped")]
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_too_many_rollbacks_stop_the_run(tmp_path, monkeypatch):
    scale_images(monkeypatch, {21 + i: 3e3 for i in range(MOST_ROLLBACKS + 1)})
    messages, error = train(tmp_path / "run", ROLLBACK)
    back = [m for m in messages if "rolled back to step 20" in m]
    assert len(back) == MOST_ROLLBACKS
    assert [m.split("skipping ")[1] for m in back] == ["1 batches", "2 batches", "3 batches"]
    assert error.startswith("step 21: the loss is ")
    _, _, event = read_batch(tmp_path / "run" / "replay", 21)
    assert event.batches_skipped == MOST_ROLLBACKS


class Slow:
    """A loader whose second batch arrives when it is released."""

    def __init__(self):
        self.release, self.n, self.rows = threading.Event(), 0, np.arange(1)

    def close(self):
        pass

    def state(self):
        return {"next_batch": self.n}

    def __next__(self):
        self.n += 1
        if self.n == 2:
            assert self.release.wait(60)
        return {}


def test_a_stalled_batch_is_reported_once():
    loader, error = Slow(), []

    def on_stall(text):
        error.append(text)
        # Leaves time for a second message, which would be wrong.
        threading.Timer(0.2, loader.release.set).start()

    with Batches(loader, "texts/", 0.05, on_stall) as batches:
        next(batches)
        assert next(batches).wait_s >= 0.2
        next(batches)
    assert len(error) == 1
    assert "batch 1 of texts/ has not arrived for 0.05 s: still waiting" in error[0]


def test_without_a_limit_a_stall_is_not_reported():
    loader, error, alive = Slow(), [], threading.active_count()
    threading.Timer(0.1, loader.release.set).start()
    with Batches(loader, "texts/", 0, error.append) as batches:
        next(batches)
        begin = time.perf_counter()
        wait_s = next(batches).wait_s
        assert wait_s <= time.perf_counter() - begin
    assert error == []
    assert threading.active_count() <= alive + 1
    with pytest.raises(UserError, match=r"stall_seconds must be at least 0, got -1"):
        check_settings(dataclasses.replace(RECIPES["digits-mlp"], stall_seconds=-1.0))


def test_waits_are_logged(tmp_path, monkeypatch):
    slow = Loader.__next__

    def sleeping(self):
        time.sleep(0.02)
        return slow(self)

    monkeypatch.setattr(Loader, "__next__", sleeping)
    train(tmp_path / "run", dataclasses.replace(RECIPE, steps=8, log_every=4))
    waits = [line["input_wait_s"] for line in lines(tmp_path / "run") if line["step"]]
    assert len(waits) == 2
    assert all(0.02 <= wait < 1 for wait in waits)


@pytest.mark.parametrize("of", ["device", "host"])
def test_running_out_of_memory_in_training_suggests_a_command(of, tmp_path, monkeypatch):
    add, seen = interval.Interval.add, []

    def allocating(self, metrics):
        seen.append(metrics)
        if len(seen) == 7:
            jnp.zeros(2**48).block_until_ready() if of == "device" else np.ones(2**50)
        add(self, metrics)

    monkeypatch.setattr(interval.Interval, "add", allocating)
    run = tmp_path / "run"
    _, error = train(run)
    assert error.startswith("out of memory (")
    assert "llocat" in error
    assert f"try jaxtrain train digits-mlp --from {run}/config.json --out {run}-smaller --accumulate 2; " in error
    assert error.endswith(f"; {command('plan', 'digits-mlp', RECIPE)} shows what fits")
    assert "\n" not in error
    monkeypatch.setattr(interval.Interval, "add", add)
    assert sorted(saved_steps(run / "checkpoints")) == [0, 5]
    assert train(run, resume=True)[1] is None


def test_flags_for_less_memory():
    def flags(batch_size, accumulate, **others):
        return flags_for_less_memory(
            dataclasses.replace(RECIPE, batch_size=batch_size, accumulate=accumulate, **others)
        )

    assert flags(64, 4) == flags(64, 4, mesh="fsdp=4", gradient_sums="sharded") == "--accumulate 8"
    assert flags(64, 4, mesh="fsdp=4") == "--accumulate 8 --gradient-sums sharded"
    assert flags(15, 1) == "--accumulate 3"
    assert flags(8, 8) == "--remat full"
    assert flags(8, 8, remat="full") is None


def test_running_out_of_memory_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "_first_evaluation", lambda *_: jnp.zeros(2**48).block_until_ready())
    _, error = train(tmp_path / "run")
    assert f"nothing was written; try the same with --accumulate 2; {command('plan', 'digits-mlp', RECIPE)} " in error
    assert not (tmp_path / "run").exists()
