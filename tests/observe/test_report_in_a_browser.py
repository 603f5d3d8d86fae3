"""The report in a browser: rendering, mouse and keyboard."""

import json
import threading
import time
from math import log

import pytest

import jaxtrain as jt
from jaxtrain.observe import MetricsLog, read_record, write_report
from jaxtrain.observe.run_report import render_report
from jaxtrain.observe.serve import report_server

from .browser import CHROMIUM, DRIVER, browser
from .runs import line, write_run

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
TAB, LEFT, HOME, ESCAPE = "\ue004", "\ue012", "\ue011", "\ue00c"
VALUE_TEXT = "return document.querySelectorAll('.plot')[0].getAttribute('aria-valuetext')"
PATHS = "return [...document.querySelectorAll('.plot .line')].map((p) => p.getAttribute('d'))"


def points(path: str) -> tuple[list[float], list[float]]:
    """Return the x and y coordinates of a curve without gaps."""
    places = [place.split() for place in path.removeprefix("M").replace("h0", "").split("L")]
    return [float(x) for x, _ in places], [float(y) for _, y in places]


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def shown(window, tmp_path):
    """A window that shows the report of a run."""
    run = write_run(tmp_path / "run")
    write_report(run.report, [read_record(run)])
    window.open(run.report.as_uri())
    time.sleep(0.3)
    yield window
    assert window.complaints() == []


def test_curves_are_drawn_at_the_positions_of_their_points(shown):
    paths = shown.run(PATHS)
    assert len(paths) == 9
    assert all("NaN" not in path for path in paths)
    xs, ys = points(paths[0])
    assert len(xs) == 4
    assert xs[1] - xs[0] == pytest.approx(xs[3] - xs[2], abs=0.2)
    assert ys == sorted(ys)  # a falling loss; y grows downwards
    # 4/11, 4/21, 4/31, 4/41 on a linear axis.
    assert (ys[1] - ys[0]) / (ys[3] - ys[0]) == pytest.approx((4 / 11 - 4 / 21) / (4 / 11 - 4 / 41), abs=0.01)
    assert shown.run("return document.querySelectorAll('.plot .skip').length") == 1


def test_a_log_axis_and_smoothing_change_the_curves(shown):
    plain = shown.run(PATHS)
    shown.run("document.querySelector('figure input').click()")
    _, ys = points(shown.run(PATHS)[0])
    assert (ys[1] - ys[0]) / (ys[3] - ys[0]) == pytest.approx(log(21 / 11) / log(41 / 11), abs=0.01)
    assert 0 < min(ys) < max(ys) < 1000  # the square that curves are drawn in
    assert shown.run(PATHS)[2:] == plain[2:]
    shown.run("f = document.querySelector('form'); f.smoothing.value = 0.9; f.dispatchEvent(new Event('input'))")
    assert shown.run("return document.querySelectorAll('.plot .raw').length") > 0
    shown.run("f = document.querySelector('form'); f.x.value = 'seconds'; f.log_x.checked = true")
    shown.run("document.querySelector('form').dispatchEvent(new Event('input'))")
    assert "NaN" not in "".join(shown.run(PATHS))


def test_everything_is_reachable_by_keyboard(shown):
    for _ in range(40):
        shown.press(TAB)
        if shown.run("return document.activeElement.classList.contains('plot')"):
            break
    assert "training 0.09756" in shown.run(VALUE_TEXT)
    shown.press(LEFT)
    assert shown.run(VALUE_TEXT).startswith("step 30, training 0.129")
    shown.press(HOME)
    assert shown.run(VALUE_TEXT).startswith("step 0, ")
    shown.press("+")
    assert not shown.run("return document.querySelector('form').whole.hidden")
    shown.press(ESCAPE)
    assert shown.run("return document.querySelector('form').whole.hidden")
    reached = "return [...document.querySelectorAll('input, select, .plot, summary')].every((e) => e.tabIndex === 0)"
    assert shown.run(reached)


def test_dragging_zooms_in(shown):
    shown.emulate("Emulation.setDeviceMetricsOverride", width=1000, height=1200, deviceScaleFactor=1, mobile=False)
    time.sleep(0.3)
    box = "b = document.querySelector('.plot').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    left, top, width, height = shown.run(box)
    middle = int(top + height / 2)
    shown.drag((int(left + width * 0.5), middle), (int(left + width * 0.9), middle))
    low, high = shown.run("p = document.querySelector('.plot'); return [p.ariaValueMin, p.ariaValueMax].map(Number)")
    assert 15 <= low < high <= 39
    assert high - low == pytest.approx(40 * 0.4, abs=2)


@pytest.mark.parametrize("width", [320, 700, 1600])
def test_the_page_fits_the_window(width, shown, tmp_path):
    shown.screenshot(tmp_path / "page.png", width, dark=width == 700)
    assert shown.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("exponent", [16, 24, 40])
def test_labels_of_the_axes_are_not_cut(exponent, window, tmp_path):
    lines = [{**line(step), "loss_scale": 2.0 ** (exponent - (step >= 20))} for step in (10, 20, 30)]
    run = write_run(tmp_path / "run")
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))
    write_report(run.report, [read_record(run)])
    window.open(run.report.as_uri())
    time.sleep(0.3)
    cut = "(t) => t.getBoundingClientRect().left < t.closest('figure').getBoundingClientRect().left"
    texts = "[...document.querySelectorAll('.plot text')]"
    assert window.run(f"return {texts}.filter({cut}).map((t) => t.textContent)") == []


def test_the_step_of_media_is_chosen_and_kept_by_a_live_page(window, tmp_path):
    run = write_run(tmp_path / "run")

    def log(step):
        with MetricsLog(run.metrics, run.tensorboard) as metrics:
            metrics.write({"step": step}, {tag: jt.Text(f"{tag} {step}") for tag in ("a", "b")})

    def shown():
        script = "return [...document.querySelectorAll('.tag')].map((tag) => tag.innerText.split(/\\s*\\n\\s*/))"
        return [[text for text in tag if text] for tag in window.run(script)]

    for step in (50, 60, 70):
        log(step)
    with report_server(
        0, lambda: str(run.metrics.stat()), lambda: render_report([read_record(run)], live=True)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        window.open(f"http://127.0.0.1:{server.server_address[1]}/")
        assert shown() == [["a", "step 70", "a 70"], ["b", "step 70", "b 70"]]
        window.run("document.querySelector('.tag input').focus()")
        window.press(LEFT)
        assert shown() == [["a", "step 60", "a 60"], ["b", "step 70", "b 70"]]
        assert window.run("return document.activeElement.ariaValueText") == "step 60"
        log(80)
        time.sleep(3)
        assert shown() == [["a", "step 60", "a 60"], ["b", "step 80", "b 80"]]
        assert window.complaints() == []
        server.shutdown()


def test_a_live_page_updates_and_keeps_the_readers_view(window, tmp_path):
    run = write_run(tmp_path / "run", steps=30)

    def stamp():
        return str(run.metrics.stat().st_mtime_ns)

    with report_server(0, stamp, lambda: render_report([read_record(run)], live=True)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        window.open(f"http://127.0.0.1:{server.server_address[1]}/")
        window.complaints()  # of the page before, whose server may have ended
        window.run("document.querySelector('details').open = true; document.querySelector('figure input').click()")
        window.run("document.querySelectorAll('.plot')[1].focus()")
        with run.metrics.open("a") as file:
            file.write(json.dumps(line(40)) + "\n")
        time.sleep(3)
        assert "step 40 of 40" in window.run("return document.querySelector('header').textContent")
        assert "0.09756" in window.run("return document.querySelector('.key').textContent")
        assert window.run("return document.querySelector('details').open")
        assert window.run("return document.querySelector('figure input').checked")
        assert window.run("return document.activeElement === document.querySelectorAll('.plot')[1]")
        assert window.complaints() == []
        server.shutdown()
    time.sleep(3)
    assert "no longer responds" in window.run("return document.getElementById('live').textContent")
