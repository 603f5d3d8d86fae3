"""Render a self-contained page about a model's errors: the worst examples, confusions and calibration."""

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from jaxtrain.data import Source, Tokenizer
from jaxtrain.folder_files import write_file
from jaxtrain.observe.pictures import READABLE, image_of
from jaxtrain.observe.predictions import Bin, Outputs, Predictions, by_kind, by_position, calibration, confusion
from jaxtrain.observe.run_record import PICTURE
from jaxtrain.pages import Chart, Panel, Stop, Table, bars, between, curve, linear, render_page, whole
from jaxtrain.run import Task

_TEXT_WIDTH = 70  # characters of a text in the terminal
_CONFUSIONS = 12  # most frequent confusions listed


class TokenLoss(NamedTuple):
    """A token of a text."""

    text: str
    loss: float | None
    """None if the token was not to be predicted."""
    predicted: str
    """The most probable token."""
    confidence: float
    """Its probability."""


class Confusion(NamedTuple):
    """How often one class was predicted in place of another."""

    target: str
    predicted: str
    times: int


@dataclass(frozen=True, eq=False)
class ErrorAnalysis:
    """A checkpoint, evaluated on the examples of a split."""

    recipe: str
    step: int
    split: str
    task: Task
    source: Source
    metrics: dict[str, float]
    """Means over all examples."""
    predictions: Predictions | Outputs

    @property
    def classes(self) -> Predictions:
        """The predictions of classes or tokens."""
        assert isinstance(self.predictions, Predictions)
        return self.predictions

    @property
    def has_classes(self) -> bool:
        """Whether classes or tokens are predicted, rather than other outputs."""
        return isinstance(self.predictions, Predictions)

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes, or their numbers; empty if tokens or other outputs are predicted."""
        if self.predictions.is_per_token or not isinstance(self.predictions, Predictions):
            return []
        count = max(self.predictions.classes, int(self.predictions.target.max(initial=-1)) + 1)
        return list(self.task.class_names) or [str(i) for i in range(count)]

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """Mean loss of each example, float64[N]."""
        return self.predictions.means()

    @cached_property
    def calibration(self) -> tuple[list[Bin], float]:
        """Reliability diagram and expected calibration error."""
        return calibration(self.classes)

    def figures(self) -> dict[str, float]:
        """Return the metrics, perplexity and calibration error, by name."""
        perplexity = {"perplexity": math.exp(min(self.metrics["loss"], 700))} if self.predictions.is_per_token else {}
        error = {"calibration error": self.calibration[1]} if self.has_classes else {}
        return {**self.metrics, **perplexity, **error}

    def describe(self, i: int) -> str:
        """Describe example `i` in one line."""
        if self.predictions.is_per_token:
            text = "".join(token.text for token in self.tokens(i))
            return repr(text if len(text) <= _TEXT_WIDTH else f"{text[:_TEXT_WIDTH]}…")
        text = self.input_text(i)
        quoted = f": {text[:_TEXT_WIDTH]!r}" if text else ""
        return f"{self.outcome(i)}{quoted}"

    def outcome(self, i: int) -> str:
        """Describe the prediction of example `i` in one line."""
        if isinstance(self.predictions, Outputs):
            return f"predicted {_brief(self.predictions.of(i))}"
        names = self.class_names
        target, predicted = (names[int(x[i])] for x in (self.predictions.target, self.predictions.predicted))
        outcome = f"{target} predicted as {predicted}" if target != predicted else f"{target}, correct"
        return f"{outcome}, confidence {self.predictions.confidence[i]:.0%}"

    def input_text(self, i: int) -> str:
        """Return the text of example `i`; empty if it is not a text."""
        return self.task.input_text(self.source[i]) if self.task.input_text else ""

    def tokens(self, i: int) -> list[TokenLoss]:
        """Return the tokens of example `i`, without special tokens that were not to be predicted."""
        tokenizer, predictions = self.task.texts, self.classes
        found = []
        for t in range(predictions.target.shape[1]):
            is_predicted = predictions.weight[i, t] > 0
            text = decode(tokenizer, int(predictions.target[i, t]))
            if text or is_predicted:
                predicted = decode(tokenizer, int(predictions.predicted[i, t]))
                loss = float(predictions.loss[i, t]) if is_predicted else None
                found.append(TokenLoss(text or "▪", loss, predicted or "▪", float(predictions.confidence[i, t])))
        return found

    def confusions(self) -> list[Confusion]:
        """Return the most frequent confusions, in descending order."""
        names = self.class_names
        counts = confusion(self.classes, len(names))
        np.fill_diagonal(counts, 0)
        order = np.argsort(-counts, axis=None, kind="stable")[:_CONFUSIONS]
        pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
        return [Confusion(names[a], names[b], int(counts[a, b])) for a, b in pairs if counts[a, b]]

    def kinds(self) -> dict[str, tuple[int, float]]:
        """Return (tokens, mean loss) by kind of token."""
        tokenizer = self.task.texts
        if tokenizer is None:
            return {}
        texts = {int(token): tokenizer.decode([int(token)]) for token in np.unique(self.classes.target)}
        return by_kind(self.classes, texts)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield one JSON object per example."""
        predictions, names = self.predictions, self.class_names
        for i in range(len(predictions)):
            line = {"index": i, "loss": _finite(self.losses[i])}
            if isinstance(predictions, Outputs):
                yield {**line, "prediction": predictions.of(i)}
            elif predictions.is_per_token:
                counted = predictions.weight[i] > 0
                yield {
                    **line,
                    "tokens": int(counted.sum()),
                    "target": predictions.target[i, counted].tolist(),
                    "losses": [_finite(x) for x in predictions.loss[i, counted]],
                }
            else:
                target, predicted = names[int(predictions.target[i])], names[int(predictions.predicted[i])]
                confidence = _finite(predictions.confidence[i])
                yield {**line, "target": target, "predicted": predicted, "confidence": confidence}


def error_summary(analysis: ErrorAnalysis, worst: int) -> dict[str, Any]:
    """Summarize an analysis as JSON.

    Args:
      analysis: The evaluated checkpoint.
      worst: Number of worst examples to list.
    """
    predictions = analysis.predictions
    details: dict[str, Any] = {}
    if isinstance(predictions, Predictions):
        bins, error = analysis.calibration
        details = {"calibration_error": error, "calibration": [bin._asdict() for bin in bins]}
        if predictions.is_per_token:
            kinds = {kind: {"tokens": n, "loss": loss} for kind, (n, loss) in analysis.kinds().items()}
            details |= {"loss_by_position": by_position(predictions), "loss_by_kind": kinds}
        else:
            names = analysis.class_names
            details |= {"classes": names, "confusion": confusion(predictions, len(names)).tolist()}
    return {
        "recipe": analysis.recipe,
        "step": analysis.step,
        "split": analysis.split,
        "examples": len(predictions),
        **{name: _finite(value) for name, value in analysis.metrics.items()},
        **details,
        "worst": [{"index": int(i), "loss": float(analysis.losses[i])} for i in predictions.worst(worst)],
    }


def write_error_page(path: Path, analysis: ErrorAnalysis, worst: int) -> None:
    """Write the page atomically, and beside it the worst examples as JSON, for the run's report.

    Args:
      path: The HTML file.
      analysis: The evaluated checkpoint.
      worst: Number of worst examples to show.
    """
    task, predictions = analysis.task, analysis.predictions
    per_token = predictions.is_per_token
    indices = [int(i) for i in predictions.worst(worst)]
    page = render_page(
        "jaxtrain.observe",
        "error_analysis.html.j2",
        title=f"{analysis.recipe}, step {analysis.step} — error analysis",
        analysis=analysis,
        predictions=predictions,
        class_names=analysis.class_names,
        figures=[
            *((name, f"{value:.4g}", "") for name, value in analysis.figures().items()),
            *((name, f"{value:.4g}", "to be beaten") for name, value in task.references.items()),
        ],
        worst=indices,
        pictures={i: _picture(analysis.source[i]) for i in indices},
        scale=math.log(task.classes or 10),
        charts=[
            *([_calibration_chart(analysis.calibration[0])] if analysis.has_classes else []),
            *([_position_chart(by_position(analysis.classes))] if per_token else []),
        ],
        kinds=_kinds_table(analysis.kinds()) if per_token else None,
        confusion=_confusion_table(analysis) if 0 < len(analysis.class_names) <= READABLE else None,
        confusions=analysis.confusions() if analysis.class_names else [],
    )
    write_file(path, page)
    write_file(path.with_suffix(".worst.json"), json.dumps(_worst(analysis, worst)))


def _calibration_chart(bins: Sequence[Bin]) -> Chart:
    x = y = between(0, 1, [0, 0.5, 1], "{:g}".format)
    width, filled = 1 / len(bins), [(i, bin) for i, bin in enumerate(bins) if bin.predictions]
    accuracy = bars([((i + 0.05) * width, (i + 0.95) * width, bin.accuracy) for i, bin in filled], x, y)
    means = curve([(bin.confidence, bin.accuracy) for _, bin in filled], x, y, "dots")
    curves = [("bar faint", accuracy), ("c7 dashed", curve([(0, 0), (1, 1)], x, y)), ("c0 dots", means)]
    text = "{:,} predictions, mean confidence {:.1%}, accuracy {:.1%}"
    return Chart(
        "Calibration",
        x,
        [Panel("accuracy", y, curves)],
        label="confidence",
        key=[("c0 dots", "accuracy at the mean confidence of a bin"), ("c7 dashed", "accuracy equals confidence")],
        stops=[Stop(i * width, (i + 1) * width, text.format(*bin)) for i, bin in filled],
    )


def _position_chart(losses: Sequence[float | None]) -> Chart:
    points = [(i, loss) for i, loss in enumerate(losses, start=1) if loss is not None]
    x, y = between(1, len(losses), whole(1, len(losses))), linear([0.0, *(loss for _, loss in points)])
    return Chart(
        "Loss by position", x, [Panel("nats, mean over the examples", y, [("c0", curve(points, x, y))])], "token"
    )


def _kinds_table(kinds: Mapping[str, tuple[int, float]]) -> Table:
    rows = [(kind, f"{n:,}", f"{loss:.3f}", f"{math.e**loss:.4g}") for kind, (n, loss) in kinds.items()]
    return Table(("", "tokens", "loss", "perplexity"), rows, "loss by kind of token", numbers={1, 2, 3})


def _confusion_table(analysis: ErrorAnalysis) -> Table:
    names, cell = analysis.class_names, Markup('<span class="heat{}" style="--share: {:.2f}">{}</span>')
    counts = confusion(analysis.classes, len(names))
    shares = np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1))
    rows = [
        [name, *(cell.format(" right" * (i == j), shares[i, j], counts[i, j] or "\xa0") for j in range(len(names)))]
        for i, name in enumerate(names)
    ]
    return Table(("true ↓ predicted →", *names), rows, "confusion matrix")


def _worst(analysis: ErrorAnalysis, count: int) -> dict[str, Any]:
    """The worst examples, each with its picture if it has one; the report reads these keys."""
    examples = [
        {
            "index": int(i),
            "loss": _finite(analysis.losses[i]),
            "description": analysis.describe(int(i)),
            "picture": _picture(analysis.source[int(i)]),
        }
        for i in analysis.predictions.worst(count)
    ]
    return {"step": analysis.step, "split": analysis.split, "examples": examples}


def decode(tokenizer: Tokenizer | None, token: int) -> str:
    """Decode one token for display; a byte that is not a character by itself is shown as its number.

    Without a tokenizer every token is shown as its number.
    """
    if tokenizer is None:
        return f"{token} "
    text = tokenizer.decode([token])
    return f"⟨{token:02x}⟩" if text == "\ufffd" else text


def _picture(example: dict[str, Any]) -> str | None:
    """Return the example's image as a data URL; None if it has no displayable one."""
    from PIL import Image

    pixels = image_of(example)
    if pixels is None:
        return None
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return f"{PICTURE}{base64.b64encode(out.getvalue()).decode()}"


def _brief(values: Any) -> str:
    """Format the numbers of an output with four digits, abbreviated to one line."""
    if isinstance(values, float):
        return f"{values:.4g}"
    if isinstance(values, dict):
        text = ", ".join(f"{name} {_brief(value)}" for name, value in values.items())
    elif isinstance(values, list | tuple):
        text = f"[{', '.join(map(_brief, values[:_TEXT_WIDTH]))}]"
    else:
        text = str(values)
    return text if len(text) <= _TEXT_WIDTH else f"{text[:_TEXT_WIDTH]}…"


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
