"""The picture of `jaxtrain plan --nodes`: MFU and throughput by the number of GPUs, as an SVG."""

from collections.abc import Sequence

from jaxtrain.observe import format_count
from jaxtrain.pages import Axis, Chart, Panel, between, curve, logarithmic, svg
from jaxtrain.planning import Growth, MeshCost

_WIDTH = 448


def draw_growths(title: str, found: Sequence[Growth], own: MeshCost, unit: str) -> str:
    """Return an SVG of two charts: MFU with the rows of a GPU fixed, and throughput with the batch fixed.

    Args:
      title: The title.
      found: How the mesh grows along its axes.
      own: The mesh that all of them contain.
      unit: Unit of the throughput, such as "tokens".
    """
    css = {axis: f"c{i % 8}" for i, axis in enumerate(dict.fromkeys(growth.axis for growth in found if growth.costs))}
    weak, strong = ([x for x in found if x.scaling == kind and x.costs] for kind in ("weak", "strong"))
    most = max([own.gpus, *(cost.gpus for growth in strong for cost in growth.costs)])
    ideal = [(gpus, own.units_per_s * gpus / own.gpus) for gpus in (own.gpus, most)]
    rates = [*(rate for _, rate in ideal), *(cost.units_per_s for growth in strong for cost in growth.costs)]

    def chart(title: str, panel: str, label: str, y: Axis, grown: Sequence[Growth], name: str) -> Chart:
        x = logarithmic([own.gpus, *(cost.gpus for growth in grown for cost in growth.costs)], 2, "{:,.0f}".format)
        curves = [("c7 dashed", curve(ideal, x, y))] if grown is strong else []
        for growth in grown:
            points = [(cost.gpus, getattr(cost, name)) for cost in growth.costs]
            hollow = [p for p, c in zip(points, growth.costs, strict=True) if dict(c.program) != dict(c.mesh)]
            curves += [
                (css[growth.axis], curve(points, x, y)),
                (f"{css[growth.axis]} dots", curve(points, x, y, "dots")),
                ("hollow dots", curve(hollow, x, y, "dots")),
            ]
        key = [(css[axis], axis) for axis in dict.fromkeys(growth.axis for growth in grown)]
        return Chart(title, x, [Panel(panel, y, curves, height=240)], label, key)

    mfu = between(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1], "{:.0%}".format)
    throughput = logarithmic(rates, label=format_count, digits=(1, 2, 5))
    filled = "GPUs; filled: compiled for that mesh; hollow: extrapolated"
    charts = [
        chart(title, "rows of a GPU fixed: MFU", filled, mfu, weak, "mfu"),
        chart("", f"batch fixed: {unit}/s", "GPUs; dashed: ideal", throughput, strong, "units_per_s"),
    ]
    return svg(charts, _WIDTH)
