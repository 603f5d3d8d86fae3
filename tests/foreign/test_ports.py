"""Published ports that install from PyPI (`requirements.txt`) are found to be what docs/foreign.md says."""

import re

import pytest

from tests.foreign import MARKS, gallery
from tests.foreign.ports import PORTS

pytestmark = MARKS

NUMBER = re.compile(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+")


def without_numbers(report):
    return NUMBER.sub("…", report)


@pytest.mark.parametrize("name", PORTS)
def test_a_check_reports_what_the_page_shows(name):
    shown = gallery.blocks(gallery.PAGE.read_text(), gallery.REPORT)
    if name not in shown:
        assert gallery.report(name).endswith(" holds")
    else:
        assert without_numbers(gallery.report(name)) == without_numbers(shown[name])


@pytest.mark.parametrize("name", gallery.CORRECTIONS)
def test_a_corrected_port_holds(name):
    assert gallery.report(name, *gallery.CORRECTIONS[name]).splitlines()[0].endswith(" holds")
