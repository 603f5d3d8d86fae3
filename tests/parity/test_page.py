"""The HTML page shows every check, whatever its numbers and names."""

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from parity.compare.trajectory import trajectory
from parity.compare.verdict import Verdict
from parity.report.page_case import Difference, Excerpt, PageCase, excerpt
from parity.report.verdict_page import write_page
from parity.settings import Settings

HELD = PageCase(
    name="mlp",
    precision="fp64",
    optimizer="AdamW",
    settings=Settings(steps=3),
    verdict=Verdict(1e-15, 2e-15, "1.weight", 3e-15, error_ratio=None, faults=()),
    torch_losses=np.array([3.0, 2.0, 1.0]),
    jax_losses=np.array([3.0, 2.0, 1.0 + 1e-15]),
    torch_scales=np.ones(4),
    jax_scales=np.ones(4),
    grad_errors={"1.weight": 2e-15, "1.bias": 1e-16},
    torch_grad_errors=None,
    floor=2.2e-16,
)
MARKUP = "<script>alert('&amp;')</script>"
DIFFERS = dataclasses.replace(
    HELD,
    name="gpt2",
    precision="fp16",
    verdict=dataclasses.replace(HELD.verdict, faults=("first gradient: 3 times as far", MARKUP), error_ratio=3.0),
    torch_scales=np.array([4.0, 2.0, 2.0, 2.0]),
    jax_scales=np.array([4.0, 4.0, 2.0, 2.0]),
    torch_grad_errors={"1.weight": 2e-4, "1.bias": 1e-4},
    floor=9.8e-4,
    difference=Difference(
        "h.0.ln_1",
        "native_layer_norm",
        Excerpt("a.py", 7, 6, ("  if a < b:", "    c &= d")),
        Excerpt("b.py", 2, 2, ("e",)),
    ),
)
VOID = {"meta", "link", "br", "img", "input", "hr"}
LEFT_OPEN = {"html", "th"}
"""Elements whose end tag HTML does not require and the page omits."""


class Page(HTMLParser):
    """The elements of a page as (tag, attributes), its text, and the tags still open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID | LEFT_OPEN:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in LEFT_OPEN:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, tag: str) -> list[str]:
        return [data for inside, data in self.texts if inside == tag]

    def having(self, tag: str, **attributes: str | None) -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and attributes.items() <= a.items()]


@pytest.fixture
def page(tmp_path: Path):
    def build(*cases: PageCase, **environment: object) -> Page:
        path = tmp_path / "page.html"
        write_page(path, environment, cases)
        assert list(tmp_path.iterdir()) == [path]
        return Page(path.read_text(encoding="utf-8"))

    return build


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([HELD] * 14 + [DIFFERS] * 2, "14 checks held, 2 differ"),
        ([HELD, DIFFERS], "1 check held, 1 differs"),
        ([HELD] * 2, "2 checks held, none differs"),
        ([], "Nothing was checked"),
    ],
)
def test_the_verdict_is_the_title_and_the_headline(page, cases, verdict):
    built = page(*cases)
    assert built.text("h1") == [verdict]
    assert built.text("title")[0] == f"{verdict} — parity"
    assert built.having("h1")[0]["class"] == ("good" if verdict.endswith("none differs") else "bad")


def test_every_check_links_to_its_section_and_those_that_differ_come_first(page):
    built = page(HELD, DIFFERS, HELD, DIFFERS)
    links = [a["href"] for a in built.having("a")]
    sections = [f"#{a['id']}" for a in built.having("div") if "id" in a]
    assert links == sections
    assert len(set(links)) == 4
    assert built.text("a") == ["gpt2", "gpt2", "mlp", "mlp"]


def test_only_the_sections_of_checks_that_differ_are_open(page):
    built = page(HELD, DIFFERS, HELD, DIFFERS)
    assert ["open" in a for a in built.having("details")] == [True, True, False, False, False]


def test_the_page_is_well_formed_and_refers_to_nothing_outside_itself(page):
    built = page(HELD, DIFFERS, python="3.11")
    assert built.open == []
    text = re.sub(r"^\s*//.*$|'sha256-[^']*'", "", built.html, flags=re.M)
    assert not re.findall(r"https?:|//[a-z]|@import|url\(", text)
    assert {a.get("href", "#")[0] for a in built.having("a")} == {"#"}
    assert not [a for tag, a in built.elements if tag == "link" or "src" in a]


def test_names_faults_excerpts_and_the_environment_are_text_not_markup(page):
    plain = page(DIFFERS)
    excerpt = Excerpt(MARKUP, 1, 1, (MARKUP,))
    names = {MARKUP: 0.1, '" onload="x': 0.2}
    built = page(
        dataclasses.replace(
            DIFFERS,
            name=MARKUP,
            verdict=dataclasses.replace(DIFFERS.verdict, grad_worst=MARKUP),
            grad_errors=names,
            torch_grad_errors=names,
            difference=Difference(MARKUP, MARKUP, excerpt, excerpt),
        ),
        **{MARKUP: [MARKUP]},
    )
    assert len(built.having("script")) == len(plain.having("script")) == 1
    assert not [a for _, a in built.elements if "onload" in a]
    assert MARKUP in built.text("a")
    assert MARKUP in built.text("li")
    assert MARKUP in built.text("dt")
    assert built.text("mark").count(f"{MARKUP}\n") == 2


def test_the_divergence_shows_both_sources_with_the_differing_line_marked(page):
    built = page(DIFFERS)
    assert {"h.0.ln_1", "native_layer_norm", "a.py:7", "b.py:2"} <= set(built.text("code"))
    assert built.text("mark") == ["  c &= d\n", "e\n"]
    assert built.text("i") == ["6", "7", "2"]
    assert not page(HELD).having("mark")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e308, -1e308, 5e-324])
def test_plots_are_valid_for_any_number(page, value):
    series = np.array([1.0, value, 1.0])
    odd = dataclasses.replace(
        DIFFERS,
        verdict=Verdict(value, value, "1.weight", value, error_ratio=value, faults=("wrong",)),
        jax_losses=series,
        torch_losses=-series,
        jax_scales=np.append(series, 2.0),
        grad_errors={"1.weight": value, "1.bias": 0.5},
        torch_grad_errors={"1.weight": 0.5, "1.bias": value},
    )
    built = page(odd)
    numbers = [
        number
        for _, attributes in built.elements
        for name in ("d", "x", "x1", "x2", "y", "y1", "y2", "width", "height")
        for number in re.findall(r"nan|inf|-?[\d.]+(?:e[-+]\d+)?", attributes.get(name) or "")
    ]
    assert len(numbers) > 100
    assert all(abs(float(number)) <= 1001 for number in numbers)
    expected = "JAX's loss is not finite at 1 of 3 steps, first at step 2" in built.text("p")
    assert expected == (not math.isfinite(value))
    assert bool(built.having("rect", **{"class": "lost"})) == (not math.isfinite(value))


def test_a_run_without_values_to_plot_still_has_its_verdict(page):
    nothing = dict.fromkeys(("torch_losses", "jax_losses", "torch_scales", "jax_scales"), ())
    built = page(dataclasses.replace(DIFFERS, grad_errors={}, torch_grad_errors={}, **nothing))
    assert built.text("a") == ["gpt2"]
    assert built.text("li") == list(DIFFERS.verdict.faults)


def test_curves_are_drawn_at_their_values(page):
    torch, jax, _, dots, *_ = [a["d"] for a in page(HELD).having("path") if a["d"].count("M") > 1 or "L" in a["d"]]
    assert torch == jax == "M166.67 0h0L500 500L833.33 1000"
    assert dots.count("M") == 2


def test_the_loss_scale_is_drawn_if_it_changed(page):
    assert "Loss scale" not in page(HELD).text("h3")
    built = page(DIFFERS)
    assert "Loss scale" in built.text("h3")
    torch, jax = [a["d"] for a in built.having("path") if "V" in a["d"]]
    assert torch == "M125 0h0H375V1000H625V1000H875V1000"
    assert jax == "M125 0h0H375V0H625V1000H875V1000"


def test_colors_rank_errors_relative_to_their_precision(page):
    def colors(precision: str, floor: float, *errors: float) -> list[tuple[str, float]]:
        named = {str(i): e for i, e in enumerate(errors)}
        built = page(dataclasses.replace(HELD, precision=precision, floor=floor, grad_errors=named))
        return [(a["class"], float(a["opacity"])) for a in built.having("rect") if "opacity" in a][: len(errors)]

    *found, lost = colors("fp64", 2.2e-16, 0.0, 1e-16, 1e-6, 1.0, 9.0, math.nan)
    assert found == [("heat", opacity) for opacity in (0.05, 0.05, 0.64, 0.9, 0.9)]
    assert lost == ("lost", 1.0)
    assert colors("bf16", 7.8e-3, 1e-6, 1e-2, 1.0) == [("heat", opacity) for opacity in (0.05, 0.36, 0.9)]


def test_the_floor_is_labelled_and_the_worst_five_parameters_are_listed(page):
    errors = {f"layer.{i}": 10.0**-i for i in range(40)}
    built = page(dataclasses.replace(HELD, grad_errors=errors))
    assert built.text("code") == [f"layer.{i}" for i in range(5)]
    assert "1.weight" in built.text("span")
    assert built.text("text").count("fp64 rounding 2.2e-16") == 2
    assert "layer.39, JAX 1.0e-39" in built.text("title")


def test_a_long_run_has_a_bounded_number_of_tooltips(page):
    losses = np.linspace(3, 1, 10_001)
    built = page(dataclasses.replace(HELD, torch_losses=losses, jax_losses=losses))
    assert 100 < len([t for t in built.text("title") if t.startswith("step ")]) <= 200


def test_a_long_run_shows_both_differences_on_one_axis_and_where_chaos_begins(page):
    course = trajectory([1e-15, 1e-9, 1e-3], [[1e-15, 1e-7, 1e-3]], limit=1e-8)
    built = page(dataclasses.replace(HELD, verdict=dataclasses.replace(HELD.verdict, trajectory=course)))
    ulp, apart = (built.having("path", **{"class": css})[-1]["d"] for css in ("c1 dotted", "c3"))
    # The axis runs from 1e-16 to 1e-3.
    assert [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", apart)] == pytest.approx([923.1, 461.5, 0], abs=0.2)
    assert [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", ulp)] == pytest.approx([923.1, 307.7, 0], abs=0.2)
    assert str(course) in built.text("p")
    assert "step 2: PyTorch 2, JAX 2, difference 1.0e-09, one ulp's 1.0e-07" in built.text("title")
    assert "c1 dotted" not in {a.get("class") for a in page(HELD).having("path")}


def test_the_lines_around_a_difference_are_read_from_its_files() -> None:
    assert excerpt((__file__, 3)) == Excerpt(
        "tests/parity/test_page.py", 3, 1, tuple(Path(__file__).read_text().splitlines()[:5])
    )
    assert excerpt(("/nowhere/model.py", 7)) == Excerpt("/nowhere/model.py", 7, 4, ())
    assert excerpt(None) is None
