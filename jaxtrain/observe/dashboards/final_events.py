"""Write the end of a run and its error analysis as TensorBoard events."""

from pathlib import Path

from jaxtrain.observe.dashboards.tensorboard import Events
from jaxtrain.observe.error_analysis import ErrorAnalysis
from jaxtrain.observe.pictures import READABLE, confusion_picture, image_of
from jaxtrain.observe.predictions import confusion
from jaxtrain.observe.run_record import Record


def log_final(folder: Path, record: Record) -> None:
    """Write what the end of a run adds: its settings beside its last evaluation, and its sample."""
    with Events(folder) as events:
        tags = [f"eval/{name}" for name in record.evaluations[-1].evaluation] if record.evaluations else []
        events.hparams({"recipe": record.config["recipe"], **record.config["settings"]}, tags)
        if record.sample:
            events.text(record.sample_step, "sample", record.sample)


def log_error_analysis(folder: Path, analysis: ErrorAnalysis, worst: int) -> None:
    """Write the worst examples as text and, where they have any, images; and the confusion matrix as an image."""
    predictions, step, split = analysis.predictions, analysis.step, analysis.split
    indices = [int(i) for i in predictions.worst(worst)]
    names = analysis.class_names
    with Events(folder) as events:
        lines = [f"{i}: loss {analysis.losses[i]:.3f}, {analysis.describe(i)}" for i in indices]
        events.text(step, f"{split}/worst", "\n".join(lines))
        for rank, i in enumerate(indices):
            pixels = image_of(analysis.source[i])
            if pixels is not None:
                # TensorBoard itself names several images of one tag like this.
                events.image(step, f"{split}/worst/image/{rank}", pixels)
        if 0 < len(names) <= READABLE:
            counts = confusion(analysis.classes, len(names))
            events.image(step, f"{split}/confusion", confusion_picture(counts, names))
