"""Charts: downsampled curves keep extrema, ends and means; each metric has a chart."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.observe.charts import average_points, chart_data, charts, thin_points
from jaxtrain.observe.log_line import LogLine
from jaxtrain.observe.run_record import Record, read_record

from .runs import line, write_run


def with_numbers(record: Record, numbers: dict) -> Record:
    """Return the record with these numbers added to each line."""
    return replace(record, metrics=[LogLine.from_json({**line.to_json(), **numbers}) for line in record.metrics])


# No mean of the smallest floats is near them: half of 5e-324 is 0.
values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6, allow_subnormal=False)), min_size=1, max_size=60)


@given(values, st.integers(2, 20))
def test_a_thinned_curve_keeps_its_ends_maximum_and_minimum(values, most):
    points = list(enumerate(values))
    kept = thin_points(points, most)
    assert len(kept) <= max(most + 4, 6)
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    known = [v for v in values if v is not None]
    if known:
        assert {min(known), max(known)} <= {v for _, v in kept}


@given(values, st.integers(1, 20))
def test_an_averaged_curve_keeps_the_mean_and_range_of_all_points(values, most):
    averaged = average_points(list(enumerate(values)), most)
    known = [v for v in values if v is not None]
    if len(values) <= most:
        assert averaged["steps"] == list(range(len(values)))
        assert "low" not in averaged
        return
    assert len(averaged["steps"]) == most
    sizes = [
        sum(v is not None for v in values[a:b])
        for a, b in zip([0, *(s + 1 for s in averaged["steps"])], [s + 1 for s in averaged["steps"]], strict=False)
    ]
    total = sum(size * mean for size, mean in zip(sizes, averaged["values"], strict=True) if mean is not None)
    assert sum(sizes) == len(known)
    assert total == pytest.approx(math.fsum(known), abs=1e-4 * max(map(abs, known), default=1) * len(values))
    if known:
        assert max(x for x in averaged["high"] if x is not None) == pytest.approx(max(known), rel=1e-5)
        assert min(x for x in averaged["low"] if x is not None) == pytest.approx(min(known), rel=1e-5)


def test_a_run_has_a_chart_per_metric_and_marks_skipped_updates(tmp_path):
    record = read_record(write_run(tmp_path / "run"))
    page = chart_data([record])
    titles = [chart["title"] for chart in page["charts"]]
    assert titles[:2] == ["loss", "validation accuracy"]
    assert {"learning rate", "gradient norm", "loss scale", "examples per second", "peak memory"} <= set(titles)
    (run,) = page["runs"]
    assert run["skips"] == [[20, 1]]
    assert run["series"]["grad_norm"] == {"steps": [10, 20, 30, 40], "values": [0.5, None, 0.5, 0.5]}
    assert run["series"]["eval_loss"]["values"] == [3.0, 0.142857, 0.0731707]
    # 40 steps of 0.02 s, at 400 examples a second.
    assert [column[-1] for column in run["clock"]] == [40, 0.8, 320.0]


def test_the_clock_has_a_point_for_each_step_however_often_it_is_logged(tmp_path):
    record = read_record(write_run(tmp_path / "run"))
    lines = [LogLine.from_json(line(step)) for step in (10, 20, 20, 10, 30)]
    assert [point.step for point in replace(record, metrics=lines).clock] == [0, 10, 20, 30]


def test_an_unknown_metric_has_a_separate_chart_and_groups_share_that_of_learning_rates(tmp_path):
    record = with_numbers(read_record(write_run(tmp_path / "run")), {"perplexity": 2.0, "lr/body": 0.1, "lr/head": 0.2})
    found = {chart.title: [curve.metric for curve in chart.curves] for chart in charts([record])}
    assert found["perplexity"] == ["perplexity"]
    assert found["learning rate"] == ["lr/body", "lr/head"]
    assert sum("lr" in metrics for metrics in found.values()) == 0


def test_with_several_runs_each_curve_has_a_chart_and_only_scaled_runs_a_loss_scale(tmp_path):
    scaled, plain = (read_record(write_run(tmp_path / name)) for name in ("scaled", "plain"))
    plain = with_numbers(plain, {"loss_scale": 1.0})
    page = chart_data([scaled, plain])
    assert ["loss_scale" in run["series"] for run in page["runs"]] == [True, False]
    assert all(len(chart["curves"]) == 1 for chart in page["charts"])
    assert "loss scale" not in [chart["title"] for chart in chart_data([plain])["charts"]]
