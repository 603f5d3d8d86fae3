"""metrics.jsonl and TensorBoard hold every step once, however the run was interrupted."""

import json
import resource

import pytest

from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe.log_line import LogLine, Rollback
from jaxtrain.observe.metrics import MetricsLog, read_metrics


def line(step: int) -> dict:
    return {"step": step, "loss": 1 / (step + 1), "eval_loss": float("nan") if step == 2 else step}


def log(folder, first: int, last: int) -> None:
    with MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", from_step=first) as metrics:
        for step in range(first, last + 1):
            metrics.write(line(step))


def scalars(folder, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [e.step for e in events.Scalars(tag)]


def test_a_line_is_on_disk_when_write_returns_and_nan_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, tmp_path / "tensorboard", from_step=0) as metrics:
        for step in range(4):
            metrics.write(line(step))
            assert json.loads(path.read_text().splitlines()[-1])["step"] == step
            assert scalars(tmp_path, "loss") == list(range(step + 1))
    assert [json.loads(text)["eval_loss"] for text in path.read_text().splitlines()] == [0, 1, None, 3]
    assert [m.has_finite_eval_loss for m in read_metrics(path)] == [True, True, False, True]


# A kill may leave any prefix of the last line; only a complete line counts.
@pytest.mark.parametrize("cut", range(0, len(json.dumps(line(5))) + 2, 5))
def test_an_incomplete_line_is_ignored_wherever_it_was_cut(cut, tmp_path):
    path = tmp_path / "metrics.jsonl"
    log(tmp_path, 0, 4)
    with path.open("a") as file:
        file.write((json.dumps(line(5)) + "\n")[:cut])
    assert [m.step for m in read_metrics(path)] == list(range(5))
    log(tmp_path, 4, 6)
    assert [m.step for m in read_metrics(path)] == list(range(7))
    assert scalars(tmp_path, "eval/loss") == list(range(7))


def test_an_incomplete_event_hides_no_other_event(tmp_path):
    log(tmp_path, 0, 4)
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-7])
    log(tmp_path, 3, 6)
    assert scalars(tmp_path, "loss") == list(range(7))


def test_a_run_that_starts_over_has_only_its_own_lines(tmp_path):
    log(tmp_path, 0, 4)
    log(tmp_path, 0, 1)
    assert [m.step for m in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    assert scalars(tmp_path, "loss") == [0, 1]


def test_invalid_lines_are_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n[]\n5\n{}\n\xff\xfe\n{"step": "x"}\n{"step": 1}\n')
    log(tmp_path, 2, 2)
    assert [m.step for m in read_metrics(path)] == [0, 1, 2]


def test_a_log_that_cannot_grow_fails_with_one_line_and_can_be_resumed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log(tmp_path, 0, 4)
    whole = path.stat().st_size
    with MetricsLog(path, tmp_path / "tensorboard", from_step=5) as metrics:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 20, hard))
            with pytest.raises(RunFailed, match=r"step 5 could not be logged in .*\(File too large\)") as failed:
                metrics.write(line(5))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(failed.value)
    assert path.stat().st_size == whole + 20
    log(tmp_path, 5, 6)
    assert [m.step for m in read_metrics(path)] == list(range(7))


def test_a_log_that_cannot_be_opened_is_an_error_of_one_line(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(UserError, match=r"cannot be written \(File exists\)"):
        log(tmp_path, 0, 1)


def test_resuming_moves_repeated_lines_aside_and_loses_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log(tmp_path, 0, 4)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    before = path.read_text().splitlines()
    log(tmp_path, 3, 3)
    log(tmp_path, 1, 1)
    superseded = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert superseded == [*before[3:6], *before[1:4]]
    assert path.read_text().splitlines() == before[:2]


def test_without_a_step_to_resume_from_lines_are_appended(tmp_path):
    log(tmp_path, 0, 4)
    with MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as metrics:
        metrics.write(line(5))
    assert [m.step for m in read_metrics(tmp_path / "metrics.jsonl")] == list(range(6))
    assert scalars(tmp_path, "loss") == list(range(6))
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_a_line_is_the_same_object_after_a_round_trip():
    written = {"step": 7, "loss": None, "grad_norm": 0.5, "skipped": 1, "tokens_per_s": 9.0, "lr": 0.1, "lr/0": 0.1}
    written |= Rollback(9, 7, 4.0, 2).to_json() | {"gpu_utilisation": 0.25, "eval_loss": 1.0, "eval_f1": None, "x": 3}
    assert list(LogLine.from_json(written).to_json().items()) == list(written.items())


def test_a_log_that_is_deleted_or_replaced_loses_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, tmp_path / "tensorboard") as metrics:
        metrics.write(line(0))
        path.unlink()
        metrics.write(line(1))
        assert [m.step for m in read_metrics(path)] == [0, 1]
        edited = tmp_path / "edited"  # as editors write a file
        edited.write_bytes(path.read_bytes())
        edited.replace(path)
        metrics.write(line(2))
    assert [m.step for m in read_metrics(path)] == [0, 1, 2]


def test_damaged_lines_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "lo\n{"step": 2, "loss": "x"}\n{"step": 3}\n{"step": 4, "l')
    with MetricsLog(path, tmp_path / "tensorboard", from_step=4) as metrics:
        assert metrics.damaged == [2, 3]
    assert path.read_bytes() == b'{"step": 0}\n{"step": 3}\n'
    superseded = (tmp_path / "metrics.superseded.jsonl").read_bytes().splitlines()
    assert superseded == [b'{"step": 1, "lo', b'{"step": 2, "loss": "x"}', b'{"step": 4, "l']
