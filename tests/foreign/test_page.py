"""docs/foreign.md shows the cases that are checked."""

from tests.foreign import gallery


def test_the_page_shows_the_code_of_its_cases():
    shown = gallery.blocks(gallery.PAGE.read_text(), gallery.CODE)
    assert shown == {name: gallery.code(name).rstrip() for name in shown}
    assert len(shown) >= 10
