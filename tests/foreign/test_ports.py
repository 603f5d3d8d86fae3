"""Published ports that install from PyPI (`requirements.txt`) are found to be what docs/foreign.md says."""

import re

import pytest

from tests.foreign import MARKS, gallery
from tests.foreign.ports import PORTS

pytestmark = MARKS

SLOW = ("gpt2", "llama", "electra", "resnet", "t5")
NUMBER = re.compile(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+")


def without_numbers(report):
    return NUMBER.sub("…", report)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SLOW)) for name in PORTS]
)
def test_a_check_reports_what_the_page_shows(name):
    shown = gallery.blocks(gallery.PAGE.read_text(), gallery.REPORT)
    if name not in shown:
        assert gallery.report(name).endswith(" holds")
    else:
        assert without_numbers(gallery.report(name)) == without_numbers(shown[name])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name != "electra")) for name in gallery.CORRECTIONS],
)
def test_a_corrected_port_holds(name):
    assert gallery.report(name, *gallery.CORRECTIONS[name]).splitlines()[0].endswith(" holds")
