"""Weights & Biases and MLflow, as a run is told to them."""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.observe.record import Record

_WANDB_PATIENCE = 30  # seconds that a server has to answer at all
_MLFLOW_BATCH = 900  # metrics to a request: MLflow takes 1000


class WandB:
    """A run in a Weights & Biases project; without an API key one on this disk, to be synced later."""

    name = "wandb"

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None

    def begin(self, record: Record, folder: Path, known: str | None) -> str:
        """The id of the run, which goes on where it is known."""
        import wandb

        # Its own lines on the terminal would be in the way of ours, and among JSON.
        settings = wandb.Settings(console="off", silent=True, init_timeout=_WANDB_PATIENCE)
        wandb.setup(settings)
        online = os.environ.get("WANDB_MODE", "online") == "online"
        self._run = wandb.init(
            project=self._project,
            id=known,
            name=folder.name,
            dir=folder,
            config=dict(record.config),
            resume="allow",
            mode="offline" if online and not wandb.login(prompt=False, verify=False) else None,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """By the run's own step, which a rollback takes back."""
        for line in lines:
            self._run.log(_finite(line))

    def end(self, record: Record, exit_status: int) -> str:
        """Its address, or its folder."""
        if record.best:
            self._run.summary["best_eval_loss"] = record.best["eval_loss"]
        if record.sample:
            self._run.summary["sample"] = record.sample
        where = f"{self._run.settings.sync_dir}, for wandb sync" if self._run.offline else self._run.url
        self._run.finish(exit_code=exit_status)
        return str(where)


class MLflow:
    """A run in an experiment of its recipe's name, at a tracking URI: a server's, or a folder's."""

    name = "mlflow"

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._run = ""
        self._client: Any = None

    def begin(self, record: Record, folder: Path, known: str | None) -> str:
        """The id of the run, which goes on where it is known."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in ("mlflow", "urllib3.connectionpool"):  # what fails is told once, by us
            logging.getLogger(name).setLevel(logging.ERROR)
        self._client = MlflowClient(self._uri)
        recipe = record.config["recipe"]
        found = self._client.get_experiment_by_name(recipe)
        experiment = found.experiment_id if found else self._client.create_experiment(recipe)
        if known:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return known
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        settings = {"recipe": recipe, **record.config["settings"]}
        self._client.log_batch(self._run, params=[Param(name, str(value)) for name, value in settings.items()])
        self._client.log_dict(self._run, dict(record.config), "config.json")
        return self._run

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """A point of each metric a line; what is not finite has none."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [
            Metric(name, value, now, line["step"])
            for line in lines
            for name, value in _finite(line).items()
            if name != "step"
        ]
        for batch in _batches(points):
            self._client.log_batch(self._run, metrics=batch)

    def end(self, record: Record, exit_status: int) -> str:
        """Its URI and id."""
        if record.sample:
            self._client.log_text(self._run, record.sample, "sample.txt")
        stopped = exit_status >= 128  # by a signal, after which it can be resumed
        status = "FINISHED" if exit_status == 0 else "KILLED" if stopped else "FAILED"
        self._client.set_terminated(self._run, status)
        return f"run {self._run} at {self._uri}"


def _finite(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if value is not None and math.isfinite(value)}


def _batches(points: list[Any]) -> Iterator[list[Any]]:
    for i in range(0, len(points), _MLFLOW_BATCH):
        yield points[i : i + _MLFLOW_BATCH]
