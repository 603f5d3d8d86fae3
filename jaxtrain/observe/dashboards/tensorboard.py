"""Write TensorBoard event files without TensorFlow and without PyTorch."""

import importlib.abc
import io
import os
import socket
import struct
import sys
import threading
import time
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from jaxtrain.folder_files import append_file, make_folder
from jaxtrain.observe.histograms import Histogram
from jaxtrain.observe.log_line import LogLine
from jaxtrain.observe.media_files import markdown_table, numbered, read_table
from jaxtrain.observe.pictures import Pixels
from jaxtrain.run import Media, MediaFile, png


class Events:
    """An event file; an event is with the operating system when its method returns.

    Args:
      folder: The folder of event files; created if there is none.
      from_step: TensorBoard hides this step and later ones of earlier files; None hides nothing.

    Raises:
      OSError: The operating system refuses a write.
    """

    def __init__(self, folder: Path, from_step: int | None = None) -> None:
        _import_tensorboardx()
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        make_folder(folder)
        # TensorBoard reads files in the order of their names; a run may be resumed within one second.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = append_file(folder / name)
        self._append(file_version="brain.Event:2")
        if from_step is not None:
            # START hides what was written before for this step and later ones (tensorboard's event_accumulator.py).
            self._append(step=from_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def scalars(self, line: LogLine) -> None:
        """Write every number of a line as a scalar."""
        values = [
            self._summary.Value(tag=name.replace("eval_", "eval/"), simple_value=value)
            for name, value in line.values().items()
            if name != "step"
        ]
        self._append(step=line.step, summary=self._summary(value=values))

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, to be shown verbatim: TensorBoard renders Markdown."""
        indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))  # a Markdown code block
        self._markdown(step, name, indented)

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        """Write an image."""
        self._png(step, name, png(pixels))

    def media(self, step: int, media: Media) -> None:
        """Write images, audio, texts, and tables as texts; several of one tag as TAG/0, TAG/1 and so on."""
        for tag, files in media.items():
            for name, file in numbered(tag, files):
                self._medium(step, name, file)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write the histogram of each array that has finite elements."""
        from tensorboardX import summary

        for name, one in histograms.items():
            if one.counts.any():
                limits, counts = one.edges()[1:], one.counts
                moments = float(one.low), float(one.high), int(counts.sum()), float(one.sum), float(one.sum_squares)
                self._append(step=step, summary=summary.histogram_raw(name, *moments, limits.tolist(), counts.tolist()))

    def hparams(self, settings: Mapping[str, Any], metrics: list[str]) -> None:
        """Write the settings of the run, to be shown beside the last values of the scalars tagged `metrics`."""
        from tensorboardX import summary

        plain = {
            name: value if isinstance(value, bool | int | float) else str(value) for name, value in settings.items()
        }
        for part in summary.hparams(plain, dict.fromkeys(metrics)):
            self._append(summary=part)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _medium(self, step: int, name: str, file: MediaFile) -> None:
        match file.suffix:
            case "png":
                self._png(step, name, file.data)
            case "wav":
                self._wav(step, name, file.data)
            case "txt":
                self.text(step, name, file.data.decode())
            case _:
                self._markdown(step, name, markdown_table(*read_table(file.data)))

    def _png(self, step: int, name: str, data: bytes) -> None:
        from PIL import Image

        with Image.open(io.BytesIO(data)) as picture:
            shape = {"height": picture.height, "width": picture.width, "colorspace": len(picture.getbands())}
        image = self._summary.Image(**shape, encoded_image_string=data)
        self._append(step=step, summary=self._summary(value=[self._summary.Value(tag=name, image=image)]))

    def _wav(self, step: int, name: str, data: bytes) -> None:
        with wave.open(io.BytesIO(data)) as sound:
            shape = {"num_channels": sound.getnchannels(), "length_frames": sound.getnframes()}
            rate = sound.getframerate()
        audio = self._summary.Audio(sample_rate=rate, **shape, encoded_audio_string=data, content_type="audio/wav")
        self._append(step=step, summary=self._summary(value=[self._summary.Value(tag=name, audio=audio)]))

    def _markdown(self, step: int, name: str, text: str) -> None:
        from tensorboardX import summary

        self._append(step=step, summary=summary.text(name, text))

    def _append(self, **fields: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (size, data)]
        write_all(self._file, size + checks[0] + data + checks[1])


def write_all(file: Any, data: bytes) -> None:
    """Write all of `data`: a nearly full disk accepts a part before it refuses the rest."""
    while data:
        data = data[os.write(file.fileno(), data) :]


class _WithoutTorch(importlib.abc.MetaPathFinder):
    """Import finder that reports torch as not installed, to one thread only."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not needed here", name=name)


def _import_tensorboardx() -> None:
    """Import tensorboardX without PyTorch, which it imports if installed: seconds, for a type annotation.

    Other threads can import torch meanwhile. `sys.meta_path` is replaced, not edited: they may be iterating over it.
    """
    if "torch" in sys.modules or "tensorboardX" in sys.modules:
        return
    finder = _WithoutTorch()
    sys.meta_path = [finder, *sys.meta_path]
    try:
        import tensorboardX  # noqa: F401
    finally:
        sys.meta_path = [other for other in sys.meta_path if other is not finder]
