"""One self-contained page about what a model gets wrong: the worst examples, who is taken for whom, how sure it is."""

import base64
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from numpy.typing import NDArray

from jaxtrain.data import Source, Tokenizer
from jaxtrain.observe.pictures import READABLE, image_of
from jaxtrain.observe.predictions import Bin, Predictions, by_kind, by_position, calibration, confusion
from jaxtrain.tasks import Task

_SHOWN = 70  # characters of a text in the terminal
_CONFUSIONS = 12


class Piece(NamedTuple):
    """A token of a text: how it reads; its loss, None where it was not to be predicted; what was held likeliest."""

    text: str
    loss: float | None
    predicted: str
    confidence: float


class Confusion(NamedTuple):
    """How often a class was taken for another."""

    target: str
    predicted: str
    times: int


@dataclass(frozen=True, eq=False)
class ErrorAnalysis:
    """A checkpoint on the examples of a split: `metrics`, means over all of them; `predictions`, of each."""

    recipe: str
    step: int
    split: str
    task: Task
    source: Source
    metrics: dict[str, float]
    predictions: Predictions

    @cached_property
    def means(self) -> NDArray[np.float64]:
        """The mean loss of each example."""
        return self.predictions.means()

    @cached_property
    def calibration(self) -> tuple[list[Bin], float]:
        """The reliability diagram and the expected calibration error."""
        return calibration(self.predictions)

    def figures(self) -> dict[str, float]:
        """The numbers of the whole."""
        perplexity = {"perplexity": math.exp(min(self.metrics["loss"], 700))} if self.predictions.of_tokens() else {}
        return {**self.metrics, **perplexity, "calibration error": self.calibration[1]}

    def said(self, i: int) -> str:
        """One example in one line."""
        if self.predictions.of_tokens():
            text = "".join(piece.text for piece in self.pieces(i))
            return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
        names, given = self.task.class_names, self.given(i)
        target, predicted = (names[int(x[i])] for x in (self.predictions.target, self.predictions.predicted))
        what = f"{target} taken for {predicted}" if target != predicted else f"{target}, rightly"
        text = f": {given[:_SHOWN]!r}" if given else ""
        return f"{what}, {self.predictions.confidence[i]:.0%} sure{text}"

    def given(self, i: int) -> str:
        """The text that the model was given."""
        return self.task.input_text(self.source[i]) if self.task.input_text else ""

    def pieces(self, i: int) -> list[Piece]:
        """The tokens of an example, without those that stand for no text and were not to be predicted."""
        texts, of = self.task.texts, self.predictions
        assert texts is not None
        found = []
        for t in range(of.target.shape[1]):
            weighs = of.weight[i, t] > 0
            text = read(texts, int(of.target[i, t]))
            if text or weighs:
                predicted = read(texts, int(of.predicted[i, t]))
                loss = float(of.loss[i, t]) if weighs else None
                found.append(Piece(text or "▪", loss, predicted or "▪", float(of.confidence[i, t])))
        return found

    def confusions(self) -> list[Confusion]:
        """The commonest."""
        names = self.task.class_names
        counts = confusion(self.predictions, len(names))
        np.fill_diagonal(counts, 0)
        order = np.argsort(-counts, axis=None, kind="stable")[:_CONFUSIONS]
        pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
        return [Confusion(names[a], names[b], int(counts[a, b])) for a, b in pairs if counts[a, b]]

    def kinds(self) -> dict[str, tuple[int, float]]:
        """Tokens and mean loss by kind of token."""
        texts = self.task.texts
        assert texts is not None
        return by_kind(self.predictions, {int(t): texts.decode([int(t)]) for t in np.unique(self.predictions.target)})

    def lines(self) -> Iterator[dict[str, Any]]:
        """One object an example, for a file."""
        of, names = self.predictions, self.task.class_names
        for i in range(len(of)):
            line = {"index": i, "loss": _finite(self.means[i])}
            if of.of_tokens():
                counted = of.weight[i] > 0
                yield {
                    **line,
                    "tokens": int(counted.sum()),
                    "target": of.target[i, counted].tolist(),
                    "losses": [_finite(x) for x in of.loss[i, counted]],
                }
            else:
                said = {"target": names[int(of.target[i])], "predicted": names[int(of.predicted[i])]}
                yield {**line, **said, "confidence": _finite(of.confidence[i])}


def error_summary(evaluated: ErrorAnalysis, worst: int) -> dict[str, Any]:
    """The figures, as JSON."""
    bins, error = evaluated.calibration
    of = evaluated.predictions
    more: dict[str, Any] = {}
    if of.of_tokens():
        more["loss_by_position"] = by_position(of)
        more["loss_by_kind"] = {kind: {"tokens": n, "loss": loss} for kind, (n, loss) in evaluated.kinds().items()}
    else:
        more["classes"] = list(evaluated.task.class_names)
        more["confusion"] = confusion(of, len(evaluated.task.class_names)).tolist()
    return {
        "recipe": evaluated.recipe,
        "step": evaluated.step,
        "split": evaluated.split,
        "examples": len(of),
        **{name: _finite(value) for name, value in evaluated.metrics.items()},
        "calibration_error": error,
        "calibration": [bin._asdict() for bin in bins],
        **more,
        "worst": [{"index": int(i), "loss": float(evaluated.means[i])} for i in of.worst(worst)],
    }


def write_error_page(path: Path, evaluated: ErrorAnalysis, worst: int) -> None:
    """Write the page, whole or not at all; beside it the worst as JSON, for the run's report."""
    task, of = evaluated.task, evaluated.predictions
    template = jinja2.Template(
        resources.files("jaxtrain.observe").joinpath("error_analysis.html.j2").read_text(),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tokens, classes = of.of_tokens(), len(task.class_names)
    page = template.render(
        evaluated=evaluated,
        figures=evaluated.figures(),
        references=task.references,
        worst=[int(i) for i in of.worst(worst)],
        pictures={int(i): _picture(evaluated.source[int(i)]) for i in of.worst(worst)},
        scale=math.log(task.classes),
        bins=evaluated.calibration[0],
        positions=_curve(by_position(of)) if tokens else None,
        kinds=evaluated.kinds() if tokens else {},
        confusion=confusion(of, classes) if not tokens and classes <= READABLE else None,
        confusions=[] if tokens else evaluated.confusions(),
    )
    _write(path, page)
    _write(path.with_suffix(".worst.json"), json.dumps(_worst(evaluated, worst)))


def _worst(evaluated: ErrorAnalysis, count: int) -> dict[str, Any]:
    """The worst, each with its picture, if it has one."""
    examples = [
        {
            "index": int(i),
            "loss": float(evaluated.means[i]),
            "said": evaluated.said(int(i)),
            "picture": _picture(evaluated.source[int(i)]),
        }
        for i in evaluated.predictions.worst(count)
    ]
    return {"step": evaluated.step, "split": evaluated.split, "examples": examples}


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read(texts: Tokenizer, token: int) -> str:
    """A token as it is shown: a byte that is no character alone, by its number."""
    text = texts.decode([token])
    return f"⟨{token:02x}⟩" if text == "\ufffd" else text


def _picture(example: dict[str, Any]) -> str | None:
    """The example's image as a data URL; None where it has none that can be seen."""
    from PIL import Image

    pixels = image_of(example)
    if pixels is None:
        return None
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def _curve(losses: list[float | None]) -> dict[str, Any]:
    """A polyline of the losses in a field of 100 by 100, and their range."""
    points = [(i, loss) for i, loss in enumerate(losses) if loss is not None]
    high = max((loss for _, loss in points), default=1.0) or 1.0
    last = max(len(losses) - 1, 1)
    return {
        "points": " ".join(f"{100 * i / last:.2f},{100 - 100 * loss / high:.2f}" for i, loss in points),
        "high": high,
        "last": len(losses),
    }


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
