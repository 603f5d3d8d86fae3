"""Output of the consoles: plain, live, quiet and JSON."""

import io
import json
import re

import pytest
from rich.console import Console as RichConsole

from jaxtrain.observe import Console, JsonConsole, QuietConsole
from jaxtrain.observe.curve import curve, sparkline
from jaxtrain.observe.live import LivePanel

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
ANSWERS = {"answers": {"prompt": f"Why{'?' * 300} so", "generated": "[b]because[/b]"}}


def print_everything(console: Console) -> None:
    console.headline("a run begins")
    console.facts({"rows": "7"})
    with console.phase("compiling"):
        pass
    with console.progress(0, 4, "tokens") as progress:
        progress.advance(1, {})
        progress.advance(2, LINE)
        progress.tables(2, ANSWERS)
        console.message("warning: training continues")
    console.sample("def f():")
    console.summary([LINE], {"floor": 1.0}, {"run": "runs/a"})


def printed(terminal: bool) -> str:
    out = io.StringIO()
    print_everything(Console(RichConsole(file=out, force_terminal=terminal, width=110, highlight=False)))
    return out.getvalue()


def panel(line: dict, width: int = 100) -> str:
    rich = RichConsole(file=io.StringIO(), width=width, record=True)
    live = LivePanel(0, 4, "tokens")
    live.advance(line["step"], line)
    live.tables(line["step"], ANSWERS)
    rich.print(live)
    return rich.export_text()


def test_forced_colors_do_not_make_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_everything(Console())
    assert "\x1b[1A" not in capsys.readouterr().out  # moves the cursor up


def test_plain_output_has_no_control_characters_and_every_number():
    text = printed(terminal=False)
    assert "\x1b" not in text
    for number in ("loss 1.500", "lr 1.0e-03", "scale 65536", "skipped 1", "12.3k tokens/s", "1.00 GiB", "left"):
        assert number in text
    assert "compiling …" in text
    assert "validation loss 1.250" in text
    (answers,) = (line for line in text.splitlines() if "answers" in line)
    expected = f"prompt 'Why{'?' * 21}…{'?' * 20} so' · generated '[b]because[/b]'"
    assert answers == f"step 2/4  answers: {expected}"


def test_a_terminal_sees_the_same_numbers_live():
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(terminal=True))
    for number in (
        "loss 1.5",
        "scale 65536",
        "tokens/s 12.3k",
        "step 2 of 4",
        "grad norm 0.5",
        "lr 1.00e-03",
        "skipped 1",
        "1.00 GiB",
        "validation loss 1.250",
        "best validation 1.25 at step 2",
        "answers, step 2",
        "prompt    Why???",
        "? so ",
        "generated [b]because[/b]",
    ):
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
    for level in (0.0, 1.0, -3e30, 1e16):
        assert len(curve([(0, level), (5, level)], {}, width=20).splitlines()) == 12


def test_a_quiet_console_prints_only_messages_to_standard_error(capsys):
    print_everything(QuietConsole())
    assert capsys.readouterr() == ("", "warning: training continues\n")


def test_a_json_console_prints_one_object_per_line(capsys):
    print_everything(JsonConsole())
    out, err = capsys.readouterr()
    assert err == ""
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["start", "facts", "phase", "step", "table", "message", "sample", "end"]
    assert events[1] == {"event": "facts", "rows": "7"}
    assert events[3] == {"event": "step", "of": 4, **LINE}
    assert events[4] == {"event": "table", "step": 2, "tag": "answers", "row": ANSWERS["answers"]}
    assert events[-1] == {"event": "end", "step": 2, "best": LINE, "references": {"floor": 1.0}, "run": "runs/a"}


def test_json_has_no_nan(capsys):
    with JsonConsole().progress(0, 4, "tokens") as progress:
        progress.advance(2, {**LINE, "grad_norm": float("nan"), "loss": float("inf")})
    event = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert (event["grad_norm"], event["loss"]) == (None, None)


def test_a_panel_shows_device_utilization_only_if_measured():
    assert not any(word in panel(LINE) for word in ("MFU", "GPU", "waiting"))
    known = {**LINE, "mfu": 0.41, "gpu_utilisation": 0.623, "input_wait_s": 0.05}
    for text in ("MFU 41%", "GPU 62%", "waiting for input 50%"):
        assert text in panel(known)
    del known["lr"]
    assert "lr set by the optimizer" in panel({**known, "loss": float("nan"), "grad_norm": float("inf")})


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_a_panel_fits_any_terminal_width(width):
    rows = panel({**LINE, "mfu": 0.41, "gpu_utilisation": 0.6}, width).splitlines()
    assert max(map(len, rows)) <= width
    text = " ".join(" ".join(row.strip("│╭╮╰╯─ ") for row in rows).split())
    for fact in ("loss 1.5", "lr 1.00e-03", "scale 65536", "skipped 1", "tokens/s 12.3k", "MFU 41%", "memory 1.00 GiB"):
        assert fact in text


def test_a_sparkline_is_at_most_as_wide_as_the_number_of_values():
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 8) == "▁"
    assert sparkline([2.0, 2.0], 8) == "▁▁"
    assert sparkline([float(i) for i in range(100)], 8) == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_user_written_loop_may_log_only_some_numbers(terminal):
    out = io.StringIO()
    console = Console(RichConsole(file=out, force_terminal=terminal, width=110, highlight=False))
    with console.progress(0, 4, "tokens") as progress:
        for step in (1, 2):
            progress.advance(step, {"step": step, "loss": 1.5, "mine": 7.0})
    assert "loss 1.5" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_the_loss_scales_of_many_layers_are_a_range_in_a_line():
    console = Console(RichConsole(file=io.StringIO(), width=100))
    with console.progress(0, 2, "tokens") as view:
        view.advance(1, {"step": 1, "loss_scale": 8.0, "mine": 3, **{f"loss_scales/{i}": 2.0**i for i in range(24)}})
    assert "step 1/2  mine 3  scale 8  layer scales 1 to 8.38861e+06  " in console.rich.file.getvalue()
