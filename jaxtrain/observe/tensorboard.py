"""TensorBoard's event files, written without TensorFlow."""

import io
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxtrain.observe.histograms import Histogram
from jaxtrain.observe.pictures import READABLE, Pixels, confusion_picture, image_of
from jaxtrain.observe.predictions import confusion

if TYPE_CHECKING:
    from jaxtrain.observe.error_analysis import ErrorAnalysis
    from jaxtrain.observe.record import Record


class Events:
    """An event file. tensorboardX's own writer has a thread: a kill loses events, an error hangs it.

    With `from_step` TensorBoard forgets that step and later ones of the files before. Raises `OSError` where the system
    refuses.
    """

    def __init__(self, folder: Path, from_step: int | None = None) -> None:
        _import_without_torch()
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names; a second may see two lives of a run.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._append(file_version="brain.Event:2")
        if from_step is not None:
            # START hides what came before of this step and later ones (tensorboard's event_accumulator.py).
            self._append(step=from_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def scalars(self, line: Mapping[str, Any]) -> None:
        """The numbers of a line of metrics.jsonl."""
        values = [
            self._summary.Value(tag=name.replace("eval_", "eval/"), simple_value=value)
            for name, value in line.items()
            if name != "step"
        ]
        self._append(step=line["step"], summary=self._summary(value=values))

    def text(self, step: int, name: str, text: str) -> None:
        """A text, shown as it is: TensorBoard takes Markdown."""
        from tensorboardX import summary

        indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))  # Markdown's code
        self._append(step=step, summary=summary.text(name, indented))

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        """A picture."""
        from PIL import Image

        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "png")
        shape = {"height": pixels.shape[0], "width": pixels.shape[1], "colorspace": 1 if pixels.ndim == 2 else 3}
        image = self._summary.Image(**shape, encoded_image_string=png.getvalue())
        self._append(step=step, summary=self._summary(value=[self._summary.Value(tag=name, image=image)]))

    def histograms(self, step: int, of: Mapping[str, Histogram]) -> None:
        """How the numbers of each array are distributed."""
        from tensorboardX import summary

        for name, one in of.items():
            if one.counts.any():
                limits, counts = one.edges()[1:], one.counts
                moments = float(one.low), float(one.high), int(counts.sum()), float(one.sum), float(one.sum_squares)
                self._append(step=step, summary=summary.histogram_raw(name, *moments, limits.tolist(), counts.tolist()))

    def hparams(self, settings: Mapping[str, Any], metrics: list[str]) -> None:
        """The settings of the run, beside the last values of the scalars of these tags."""
        from tensorboardX import summary

        plain = {
            name: value if isinstance(value, bool | int | float) else str(value) for name, value in settings.items()
        }
        for part in summary.hparams(plain, dict.fromkeys(metrics)):
            self._append(summary=part)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (size, data)]
        write_all(self._file, size + checks[0] + data + checks[1])


def log_final(folder: Path, record: "Record") -> None:
    """What the end of a run adds: its settings beside its last evaluation, and its sample."""
    with Events(folder) as events:
        evaluated = record.evaluations[-1] if record.evaluations else {}
        tags = [name.replace("eval_", "eval/") for name in evaluated if name.startswith("eval_")]
        events.hparams({"recipe": record.config["recipe"], **record.config["settings"]}, tags)
        if record.sample:
            events.text(record.sample_step, "sample", record.sample)


def log_error_analysis(folder: Path, evaluated: "ErrorAnalysis", worst: int) -> None:
    """What an evaluation adds: its worst examples in words and, where they have any, their images; and a picture of who
    is taken for whom."""
    of, step, split = evaluated.predictions, evaluated.step, evaluated.split
    shown = [int(i) for i in of.worst(worst)]
    names = evaluated.task.class_names
    with Events(folder) as events:
        said = [f"{i}: loss {evaluated.means[i]:.3f}, {evaluated.said(i)}" for i in shown]
        events.text(step, f"{split}/worst", "\n".join(said))
        for place, i in enumerate(shown):
            pixels = image_of(evaluated.source[i])
            if pixels is not None:
                # As TensorBoard itself names the images of one tag.
                events.image(step, f"{split}/worst/image/{place}", pixels)
        if not of.of_tokens() and len(names) <= READABLE:
            events.image(step, f"{split}/confusion", confusion_picture(confusion(of, len(names)), names))


def write_all(file: Any, data: bytes) -> None:
    """Write `data`: on a full disk a part is taken before the rest is refused."""
    while data:
        data = data[os.write(file.fileno(), data) :]


def _import_without_torch() -> None:
    """tensorboardX imports PyTorch where it is there: seconds, for what is not used here."""
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # as none is: https://docs.python.org/3/reference/import.html
    try:
        import tensorboardX  # noqa: F401
    finally:
        del sys.modules["torch"]
