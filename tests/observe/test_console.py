"""What a user sees."""

import io

from rich.console import Console as RichConsole

from jaxtrain.observe import Console
from jaxtrain.observe.curve import curve

LINE = {
    "step": 2,
    "loss": 1.5,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "loss_scale": 65536.0,
    "skipped": 1,
    "tokens_per_s": 12345.0,
    "step_time_s": 0.1,
    "peak_memory_bytes": 2**30,
    "eval_loss": 1.25,
}


def spoken(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(RichConsole(file=out, force_terminal=terminal, width=110, highlight=False))
    with console.phase("compiling"):
        pass
    with console.progress(0, 4, "tokens") as progress:
        progress.advance(1, {})
        progress.advance(2, LINE)
    return out.getvalue()


def test_plain_output_has_no_control_characters_and_every_number():
    text = spoken(terminal=False)
    assert "\x1b" not in text
    for number in ("loss 1.500", "lr 1.0e-03", "scale 65536", "skipped 1", "12.3k tokens/s", "1024 MiB", "left"):
        assert number in text
    assert "compiling …" in text
    assert "validation loss 1.250" in text


def test_a_terminal_sees_the_same_numbers_live():
    text = spoken(terminal=True)
    for number in ("loss 1.500", "scale 65536", "12.3k tokens/s", "2/4", "validation loss 1.250"):
        assert number in text


def test_a_curve_falls_from_the_top_left_to_the_bottom_right():
    rows = curve([(0, 4.0), (50, 2.0), (100, 1.0)], {"floor": 2.5}, width=40).splitlines()
    filled = [sum(c not in " ·" for c in row.split("┤")[1]) for row in rows if "┤" in row]
    assert filled == sorted(filled)
    assert filled[0] == 4
    assert filled[-1] == 40
    assert sum("·" in row for row in rows) == 1


def test_a_curve_of_one_point_or_a_constant_is_drawn():
    assert curve([(0, 1.0)], {}, width=20)
    assert curve([(0, 1.0), (5, 1.0)], {}, width=20)
