"""Runs log the media that a user's functions return."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.run import MediaFile
from jaxtrain.runner.events import Events

from .test_fit import Line, Scored, examples


def picture(state):
    return jt.Image(np.full((4, 4), int(state.step) / 100))


@dataclass(frozen=True, kw_only=True)
class Illustrated(Line):
    """A line whose evaluation returns an image alone."""

    def task(self):
        return dataclasses.replace(
            super().task(), validation=examples()[:10], evaluate=lambda state, batches: {"w": picture(state)}
        )


def on_step(step, metrics, state):
    return {"text": [jt.Text(f"{step}: {float(metrics['loss']):.6f}"), jt.Text("more")]} if step % 3 == 0 else None


def media(done):
    return {line["step"]: line["media"] for line in done.history if "media" in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return jt.fit(
        Illustrated(),
        tmp_path_factory.mktemp("whole") / "run",
        quiet=True,
        on_step=on_step,
        on_evaluation=lambda step, metrics, state: {"table": jt.Table([*metrics], [[*metrics.values()]])},
    )


def test_media_of_evaluations_and_events_are_logged_beside_the_means_of_the_loss(whole):
    tags = {step: [*found] for step, found in media(whole).items()}
    both = ["w", "table"]
    assert tags == {0: both, 3: ["text"], 4: both, 6: ["text"], 8: both, 9: ["text"], 12: ["text", *both]}
    assert [line["step"] for line in whole.history if "eval_bias" in line] == [0, 4, 8, 12]
    assert [sorted(line) for line in whole.history if line["step"] == 3] == [["media", "step"]]
    named = [whole.run.media / name for found in media(whole).values() for names in found.values() for name in names]
    assert {path.name for path in named} == {path.name for path in whole.run.media.iterdir()}
    page = whole.run.report.read_text()
    assert page.count('data-tag="') == 3
    assert "step 12" in page


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_is_stopped_or_killed_and_resumed_has_the_media_of_an_uninterrupted_one(saved, whole, tmp_path):
    events = {"on_evaluation": lambda step, metrics, state: {"table": jt.Table([*metrics], [[*metrics.values()]])}}

    def stop(step, metrics, state):
        if step == 10 and saved:
            raise ZeroDivisionError
        if step == 10:  # as a kill, nothing is saved at this step: the run resumes from step 5
            raise KeyboardInterrupt
        return on_step(step, metrics, state)

    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        jt.fit(Illustrated(), tmp_path / "run", quiet=True, on_step=stop, **events)
    resumed = jt.fit(Illustrated(), tmp_path / "run", quiet=True, resume=True, on_step=on_step, **events)
    assert media(resumed) == media(whole)


def test_invalid_media_of_an_event_end_the_run_saved(tmp_path):
    run, wrong = tmp_path / "run", {"w": jt.Image(np.ones((2, 2, 2)))}
    with pytest.raises(jt.UserError, match="media 'w': an image has shape"):
        jt.fit(Line(), run, quiet=True, on_step=lambda step, metrics, state: wrong if step == 3 else None)
    assert (run / "checkpoints" / "3" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"w": 3.0}, "media 'w' is float 3.0: wrap it in jaxtrain.Image"),
        (jt.Text("a"), "on_evaluation returned Text: return None, or a mapping of tags to media"),
        ({"taken": jt.Text("a")}, "media 'taken' of on_evaluation were already logged at this step: use another tag"),
    ],
)
def test_what_an_event_returns_is_checked(returned, message):
    events = Events(on_evaluation=[lambda *given: {"first": jt.Text("b")}, lambda *given: returned])
    events.evaluation(0, {}, None, {"taken": [MediaFile("txt", b"")]})
    assert isinstance(events.error, jt.UserError)
    assert message in str(events.error)
    assert [*events.take_media()] == ["taken", "first"]
    assert events.take_media() == {}


def test_an_invalid_evaluation_is_reported_before_anything_is_written(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Scored):
        def task(self):
            return dataclasses.replace(
                super().task(), evaluate=lambda state, batches: {"accuracy": 1.0, "x": jnp.zeros((2, 2))}
            )

    with pytest.raises(jt.UserError, match=r"the evaluation's 'x' is an array of float32 \[2, 2\]: return a number"):
        jt.fit(Wrong(), tmp_path / "run", quiet=True)
    assert not Path(tmp_path / "run").exists()
