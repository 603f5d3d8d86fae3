"""The picture of `jaxtrain plan --nodes`: MFU and throughput by the number of GPUs, as an SVG."""

from collections.abc import Callable, Iterator, Sequence

from jaxtrain.observe import format_count
from jaxtrain.pages import Axis, Chart, Panel, between, curve, logarithmic
from jaxtrain.planning import Growth, MeshCost

_WIDTH = 760


def draw_growths(title: str, found: Sequence[Growth], own: MeshCost, unit: str) -> str:
    """Return an SVG of two panels: MFU with the rows of a GPU fixed, and throughput with the batch fixed.

    Args:
      title: The title.
      found: How the mesh grows along its axes.
      own: The mesh that all of them contain.
      unit: Unit of the throughput, such as "tokens".
    """
    found = [growth for growth in found if growth.costs]
    css = {axis: f"c{i % 8}" for i, axis in enumerate(dict.fromkeys(growth.axis for growth in found))}
    x = logarithmic([own.gpus, *(cost.gpus for growth in found for cost in growth.costs)], 2, "{:,.0f}".format)
    most = max([own.gpus, *(cost.gpus for growth in found if growth.scaling == "strong" for cost in growth.costs)])
    ideal = [(gpus, own.units_per_s * gpus / own.gpus) for gpus in (own.gpus, most)]
    mfu = between(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1], "{:.0%}".format)
    throughput = logarithmic(
        [y for _, y in ideal] + [c.units_per_s for growth in found if growth.scaling == "strong" for c in growth.costs],
        label=format_count,
        digits=(1, 2, 5),
    )

    def curves(scaling: str, y: Axis, value: Callable[[MeshCost], float]) -> Iterator[tuple[str, str]]:
        for growth in found:
            if growth.scaling == scaling:
                points = [(cost.gpus, value(cost)) for cost in growth.costs]
                extrapolated = [
                    point
                    for point, cost in zip(points, growth.costs, strict=True)
                    if dict(cost.program) != dict(cost.mesh)
                ]
                yield css[growth.axis], curve(points, x, y)
                yield f"{css[growth.axis]} dots", curve(points, x, y, "dots")
                yield "hollow dots", curve(extrapolated, x, y, "dots")

    chart = Chart(
        title,
        x,
        [
            Panel("rows of a GPU fixed: MFU", mfu, [*curves("weak", mfu, lambda cost: cost.mfu)], height=200),
            Panel(
                f"batch fixed: {unit}/s; dashed: ideal",
                throughput,
                [
                    ("c7 dashed", curve(ideal, x, throughput)),
                    *curves("strong", throughput, lambda cost: cost.units_per_s),
                ],
                height=200,
            ),
        ],
        label="GPUs; filled: compiled for that mesh; hollow: extrapolated",
        key=[(css[axis], axis) for axis in css],
    )
    return chart.svg(_WIDTH)
