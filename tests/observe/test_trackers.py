"""Contents of the local stores of Weights & Biases and MLflow."""

import json
import struct

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.observe import MetricsLog, write_result
from jaxtrain.observe.dashboards import tracking
from jaxtrain.observe.dashboards.trackers import MLflow, WandB
from jaxtrain.observe.dashboards.tracking import track_run

from .runs import write_run

pytestmark = pytest.mark.filterwarnings("default")  # the trackers' own warnings


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch):
    """Their first import can take minutes on a busy machine."""
    monkeypatch.setattr(tracking, "_TIMEOUT", 600.0)
    monkeypatch.setattr(tracking, "_SHORT_TIMEOUT", 600.0)


def wandb_records(path) -> list:
    """Return the records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, records, part = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if not kind:
            break
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            records.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return records


def log_media(run):
    """Log media of every kind at step 50."""
    with MetricsLog(run.metrics, run.tensorboard) as log:
        media = {
            "grid/a": [jt.Image(np.zeros((4, 6))), jt.Image(np.ones((4, 6, 3)))],
            "tone": jt.Audio(np.zeros(80), 8000),
            "text": jt.Text("<b>a</b>"),
            "table": jt.Table(["a", "b"], [["x", 1], [2, None]]),
        }
        log.write({"step": 50, "eval_loss": 0.5}, media)


def test_wandb_offline_records_the_run_without_a_key(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    run, messages = write_run(tmp_path / "run"), []
    write_result(run, step=40, references={}, sample="a sample")
    log_media(run)
    for _ in range(2):  # the second time there is nothing new
        with track_run(run, [WandB("digits")], messages.append) as ended:
            ended(0)
    wandb.teardown()
    files = sorted(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert files[0].name == files[1].name
    assert all(text.startswith("wandb: ") and text.endswith(", for wandb sync") for text in messages)
    histories = []
    for file in files:
        records = wandb_records(file)
        (begun,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        assert (begun.project, begun.display_name) == ("digits", "run")
        assert "settings" in {entry.key for entry in begun.config.update}
        rows = [r.history.item for r in records if r.WhichOneof("record_type") == "history"]
        histories.append([{item.key or "/".join(item.nested_key): item.value_json for item in row} for row in rows])
    steps, losses = ([json.loads(row.get(name, "null")) for row in histories[0]] for name in ("step", "eval_loss"))
    assert (steps, losses) == ([0, 10, 20, 30, 40, 50], [3.0, None, 1 / 7, None, 3 / 41, 0.5])
    last = {name.removeprefix("media/"): json.loads(value) for name, value in histories[0][-1].items()}
    kinds, paths = (
        {name.removesuffix(end): value for name, value in last.items() if name.endswith(end)}
        for end in ("/_type", "/path")
    )
    assert kinds == {
        **{"grid/a/0": "image-file", "grid/a/1": "image-file", "tone": "audio-file"},
        **{"text": "html-file", "table": "table-file"},
    }
    stored = {name: files[0].parent / "files" / path for name, path in paths.items()}
    assert "&lt;b&gt;a&lt;/b&gt;" in stored["text"].read_text()
    assert json.loads(stored["table"].read_text())["data"] == [["x", 1], [2, None]]
    assert stored["tone"].read_bytes()[:4] == b"RIFF"
    assert "grad_norm" not in histories[0][2]
    assert histories[1] == []


@pytest.mark.filterwarnings("default")  # from MLflow's database
def test_mlflow_records_the_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run, messages = write_run(tmp_path / "run"), []
    write_result(run, step=40, references={}, sample="a sample")
    log_media(run)
    for status in (143, 0):
        with track_run(run, [MLflow(uri)], messages.append) as ended:
            ended(status)
    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "digits-mlp"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert messages == [f"mlflow: run {found.info.run_id} at {uri}"] * 2
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["lr"] == "0.01"
    history = client.get_metric_history(found.info.run_id, "eval_loss")
    assert [(m.step, m.value) for m in history] == [(0, 3.0), (20, 1 / 7), (40, 3 / 41), (50, 0.5)]
    assert [m.step for m in client.get_metric_history(found.info.run_id, "grad_norm")] == [10, 30, 40]
    assert {f.path for f in client.list_artifacts(found.info.run_id)} == {
        *("config.json", "images", "media", "sample.txt")
    }
    images = [f.path for f in client.list_artifacts(found.info.run_id, "images") if f.path.endswith(".png")]
    assert sorted(path.split("+timestamp")[0] for path in images) == [f"images/grid~a~{i}+step+50" for i in range(2)]
    files = [f.path for f in client.list_artifacts(found.info.run_id, "media")]
    assert sorted(path.split("-")[1] for path in files) == ["table", "text", "tone"]


@pytest.mark.filterwarnings("default")  # from MLflow's database
def test_a_failing_disk_is_reported_once(tmp_path):
    pytest.importorskip("mlflow")
    run, messages = write_run(tmp_path / "run"), []
    (tmp_path / "file").touch()
    with track_run(run, [MLflow(f"sqlite:///{tmp_path}/file/mlflow.db")], messages.append) as ended:
        ended(0)
    (warning,) = messages
    assert warning.startswith("warning: mlflow stopped tracking: ")
