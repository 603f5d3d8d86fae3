"""Report runs to Weights & Biases and MLflow."""

import html
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.folder_files import read_file
from jaxtrain.observe.log_line import LogLine
from jaxtrain.observe.media_files import media_paths, read_table
from jaxtrain.observe.run_record import Record
from jaxtrain.run_folder import RunFolder

_WANDB_TIMEOUT = 30  # seconds for the server's first answer
_MLFLOW_BATCH = 900  # metrics per request: MLflow accepts 1000


class WandB:
    """Reports to a Weights & Biases project; without an API key to a local folder, for `wandb sync`."""

    name = "wandb"

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None
        self._media = Path()

    def begin(self, record: Record, folder: Path, run_id: str | None) -> str:
        """Create or continue a run; return its id."""
        import wandb

        self._media = RunFolder(folder).media
        # wandb's own terminal output would mix with ours, and with JSON.
        settings = wandb.Settings(console="off", silent=True, init_timeout=_WANDB_TIMEOUT)
        wandb.setup(settings)
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        self._run = wandb.init(
            project=self._project,
            id=run_id,
            name=folder.name,
            dir=folder,
            config=dict(record.config),
            resume="allow",
            mode="offline" if is_online and not wandb.login(prompt=False, verify=False) else None,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, lines: Sequence[LogLine]) -> None:
        """Log against our own step: wandb's cannot decrease, as it does in a rollback."""
        for line in lines:
            media = {f"media/{name}": _wandb_medium(path) for name, path in media_paths(self._media, line)}
            self._run.log(_finite(line) | media)

    def end(self, record: Record, exit_status: int) -> str:
        """Finish the run; return its address, or its local folder."""
        if record.best:
            self._run.summary["best_eval_loss"] = record.best.eval_loss
        if record.sample:
            self._run.summary["sample"] = record.sample
        where = f"{self._run.settings.sync_dir}, for wandb sync" if self._run.offline else self._run.url
        self._run.finish(exit_code=exit_status)
        return str(where)


class MLflow:
    """Reports to an MLflow experiment named after the recipe, at the tracking URI of a server or a folder."""

    name = "mlflow"

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._run = ""
        self._media = Path()
        self._client: Any = None

    def begin(self, record: Record, folder: Path, run_id: str | None) -> str:
        """Create or continue a run; return its id."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._media = RunFolder(folder).media
        for name in ("mlflow", "urllib3.connectionpool"):  # a failure is reported once, by us
            logging.getLogger(name).setLevel(logging.ERROR)
        self._client = MlflowClient(self._uri)
        recipe = record.config["recipe"]
        existing = self._client.get_experiment_by_name(recipe)
        experiment = existing.experiment_id if existing else self._client.create_experiment(recipe)
        if run_id:
            self._run = run_id
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        settings = {"recipe": recipe, **record.config["settings"]}
        self._client.log_batch(self._run, params=[Param(name, str(value)) for name, value in settings.items()])
        self._client.log_dict(self._run, dict(record.config), "config.json")
        return self._run

    def log(self, lines: Sequence[LogLine]) -> None:
        """Log a point for each finite number of each line, and its media as artifacts."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [
            Metric(name, value, now, line.step)
            for line in lines
            for name, value in _finite(line).items()
            if name != "step"
        ]
        for batch in _batches(points):
            self._client.log_batch(self._run, metrics=batch)
        for line in lines:
            for name, path in media_paths(self._media, line):
                self._log_medium(line.step, name, path)

    def end(self, record: Record, exit_status: int) -> str:
        """Finish the run; return its id and URI."""
        if record.sample:
            self._client.log_text(self._run, record.sample, "sample.txt")
        by_signal = exit_status >= 128  # such a run can be resumed
        status = "FINISHED" if exit_status == 0 else "KILLED" if by_signal else "FAILED"
        self._client.set_terminated(self._run, status)
        return f"run {self._run} at {self._uri}"

    def _log_medium(self, step: int, name: str, path: Path) -> None:
        if path.suffix != ".png":
            self._client.log_artifact(self._run, str(path), "media")
            return
        from PIL import Image

        key = re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)
        with Image.open(path) as picture:
            self._client.log_image(self._run, picture, key=key, step=step, synchronous=True)


def _wandb_medium(path: Path) -> Any:
    import wandb

    match path.suffix:
        case ".png":
            return wandb.Image(str(path))
        case ".wav":
            return wandb.Audio(str(path))
        case ".txt":
            text = html.escape(read_file(path).decode(errors="replace"))
            return wandb.Html(f"<pre>{text}</pre>", data_is_not_path=True)
        case _:
            columns, rows = read_table(read_file(path))
            return wandb.Table(columns=[*columns], data=rows, allow_mixed_types=True)


def _finite(line: LogLine) -> dict[str, float]:
    return {name: value for name, value in line.values().items() if math.isfinite(value)}


def _batches(points: list[Any]) -> Iterator[list[Any]]:
    for i in range(0, len(points), _MLFLOW_BATCH):
        yield points[i : i + _MLFLOW_BATCH]
