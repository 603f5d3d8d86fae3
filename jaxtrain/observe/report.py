"""report.html: one self-contained page about one run."""

import io
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

# Read on a white and on a black page alike.
_TRAIN, _VALIDATION, _GRID = "#3b82f6", "#f59e0b", "#8888"


def write_report(
    path: Path,
    metrics: list[dict[str, Any]],
    config: Mapping[str, Any],
    references: Mapping[str, float],
    sample: str | None,
) -> None:
    """Write the page: verdict, curves, a sample, settings, environment."""
    evaluations = [m for m in metrics if m.get("eval_loss") is not None]
    template = jinja2.Template(
        resources.files("jaxtrain.observe").joinpath("report.html.j2").read_text(), autoescape=True
    )
    page = template.render(
        recipe=config["recipe"],
        best=min(evaluations, key=lambda m: m["eval_loss"]) if evaluations else None,
        last=evaluations[-1] if evaluations else None,
        references=references,
        loss_svg=_svg(metrics, ("loss", "eval_loss"), references, "nats"),
        detail_svgs=[_svg(metrics, (name,), {}, unit) for name, unit in _details(metrics)],
        sample=sample,
        settings=config["settings"],
        environment={k: v if isinstance(v, str) else json.dumps(v) for k, v in _environment(config).items()},
    )
    partial = path.with_suffix(".partial")
    partial.write_text(page)
    partial.replace(path)


def _details(metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The other curves worth a look, with their units: the loss scale only where it moved."""
    names = [k for k in (metrics[-1] if metrics else {}) if k.endswith("_per_s")]
    scales = {m["loss_scale"] for m in metrics if "loss_scale" in m}
    return [
        ("lr", ""),
        ("grad_norm", ""),
        *[(n, "") for n in names],
        *([("loss_scale", "")] if len(scales) > 1 else []),
    ]


def _environment(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in ("recipe", "settings")}


def _svg(metrics: list[dict[str, Any]], names: tuple[str, ...], references: Mapping[str, float], unit: str) -> str:
    """The named metrics against the step, as an SVG element."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2 if len(names) > 1 else 1.9), layout="constrained")
    axes = figure.subplots()
    for name, colour in zip(names, (_TRAIN, _VALIDATION), strict=False):
        points = [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
        marker = "o" if name.startswith("eval_") else None
        axes.plot(*zip(*points, strict=True), label=_LABELS.get(name, name), color=colour, marker=marker, markersize=3)
    for name, value in references.items():
        axes.axhline(value, color="#888", linestyle="--", linewidth=1, label=f"{name} {value:.3f}")
    axes.set_ylabel(unit or _LABELS.get(names[0], names[0]))
    axes.set_xlabel("step")
    axes.grid(color=_GRID, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_color("#888")
    axes.tick_params(colors="#888")
    axes.xaxis.label.set_color("#888")
    axes.yaxis.label.set_color("#888")
    if len(names) > 1:
        axes.legend(frameon=False, labelcolor="#888")
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


_LABELS = {
    "tokens_per_s": "tokens/s",
    "examples_per_s": "examples/s",
    "loss": "training loss",
    "eval_loss": "validation loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
