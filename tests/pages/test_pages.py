"""Axes place values and label round ticks; a page escapes its texts and runs no script but its own."""

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.pages import Chart, Panel, Region, Stop, Strip, Table, between, curve, linear, logarithmic, svg, whole

EVIL = "</script><script>alert('&amp;')</script>"


def test_zero_has_a_place_below_all_powers_of_a_logarithmic_axis():
    axis = logarithmic([0.0, 1.0, 100.0])
    assert [axis.place(x) for x in (0.0, 1.0, 10.0, 100.0)] == pytest.approx([0, 1 / 6, 7 / 12, 1])
    assert [name for _, name in axis.ticks] == ["0", "1e0", "1e1", "1e2"]
    assert logarithmic([1.0, 100.0]).place(1.0) == 0


def test_a_logarithmic_axis_may_end_at_other_digits():
    axis = logarithmic([3.0, 150.0], label="{:g}".format, digits=(1, 2, 5))
    assert [name for _, name in axis.ticks] == ["2", "10", "50", "200"]
    assert (axis.place(2.0), axis.place(200.0)) == pytest.approx((0, 1))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=5))
def test_every_value_has_a_place_on_an_axis_with_increasing_ticks(values):
    for axis in (linear(values), logarithmic(values), logarithmic(values, base=2)):
        places = [at for at, _ in axis.ticks]
        assert len(places) >= 2
        assert places[0] == 0
        assert places[-1] <= 1
        assert all(a < b for a, b in itertools.pairwise(places))
        for value in values:
            if value - value == 0:
                assert -1e-6 <= axis.place(value) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1.0, 3.0], ["1.0", "1.5", "2.0", "2.5", "3.0"]),
        ([0.0123], ["0.011", "0.012", "0.013", "0.014"]),
        ([-3e6, 8e6], ["-5e+06", "0", "5e+06", "1e+07"]),
        ([], ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_a_linear_axis_ends_at_round_numbers(values, labels):
    assert [label for _, label in linear(values).ticks] == labels


def test_integers_are_labeled_once():
    assert [whole(0, 3), whole(1, 1), whole(0, 400)] == [[0, 1, 2, 3], [1], [0, 100, 200, 300, 400]]


def test_texts_of_a_chart_and_a_table_are_escaped():
    x = between(0, 1)
    parts = [Panel(EVIL, linear([0, 1]), [("c0", curve([(0, 1)], x, x))], [(0.5, EVIL)]), Strip(EVIL, [], EVIL)]
    chart = Chart(EVIL, x, parts, EVIL, [("c0", EVIL)], [Stop(0, 1, EVIL)], [Region(0, 1, "zero", EVIL)], notes=[EVIL])
    table = Table([EVIL], [[EVIL, EVIL]], EVIL)
    for html in (chart.__html__(), table.__html__(), svg([chart], 300)):
        assert "<script" not in html
        ElementTree.fromstring(f"<page>{html}</page>")


def test_an_svg_file_has_its_own_styles_and_no_other_file():
    x = between(0, 1)
    file = svg([Chart("title", x, [Panel("", x, [])])] * 2, 300)
    assert ElementTree.fromstring(file).get("width") == "600"
    assert ":root" not in file
    assert not re.findall(r"href|url\(|@import", file)
