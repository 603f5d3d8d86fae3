"""Fields of dataclasses as flags: values, bounds, help and errors."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.errors import UserError
from jaxtrain.fields import Bound, Count, Rate, at_least, at_most, bounds, field_errors
from jaxtrain.flags import Flag, field_docs, parse, parse_both, parse_known
from jaxtrain.recipes import RECIPES
from jaxtrain.run import Recipe


@dataclass(frozen=True, kw_only=True)
class Everything:
    """A field of each type.

    This paragraph is not in the help.
    """

    count: Count = 3
    """Number of
    things, 100% of them."""
    factor: float = 0.5
    name: str = "a"
    where: Path = Path("here")
    chosen: Literal["x", "y", 2] = "x"
    on: bool = False
    off: bool = True
    rate: Rate | None = None
    mixed: int | str = 1
    sizes: tuple[int, ...] = (8, 8)
    bare: Annotated[int | None, Flag(name="port", short="-p", metavar="PORT", bare=lambda: 80)] = None
    auto: Annotated[bool | Literal["auto"], Flag(bare=lambda: True, choices=("auto",))] = False


def test_each_type_is_read_from_its_words() -> None:
    words = (
        "--count 7 --factor -1e-3 --name b --where x/y --chosen 2 --on --no-off --rate 0.25 --mixed b2 --sizes 1 2 3 "
        "-p --auto auto"
    )
    expected = Everything(
        **{"count": 7, "factor": -1e-3, "name": "b", "where": Path("x/y"), "chosen": 2, "on": True, "off": False},
        **{"rate": 0.25, "mixed": "b2", "sizes": (1, 2, 3), "bare": 80, "auto": "auto"},
    )
    assert parse(Everything(), words.split(), "prog") == expected
    back = "--rate None --mixed 5 --port 99 --auto --no-on --off --sizes --chosen=x"
    again = parse(expected, back.split(), "prog")
    assert (again.rate, again.mixed, again.bare, again.auto, again.on, again.off) == (None, 5, 99, True, False, True)
    assert (again.sizes, again.chosen, again.count) == ((), "x", 7)


@dataclass(frozen=True)
class Command:
    """Arguments without flags, and lists."""

    cases: Annotated[tuple[str, ...], Flag(positional=True, metavar="CASE")] = ()
    precision: Annotated[tuple[str, ...], Flag(listed=True, choices=("a", "b"))] = ()
    rate: Annotated[Rate | None, Flag(metavar="P")] = None


@dataclass(frozen=True)
class Named:
    """One argument without a flag."""

    case: Annotated[str, Flag(positional=True, metavar="CASE")] = ""


def test_positional_arguments_and_lists() -> None:
    words = ["x", "y", "--precision", "a,b", "--precision", "a", "--rate", "0.5"]
    assert parse(Command(), words, "prog") == Command(("x", "y"), ("a", "b", "a"), 0.5)
    assert parse(Command(), [], "prog") == Command()
    assert parse(Command(), ["--precision", "b", "x"], "prog") == Command(("x",), ("b",))
    assert field_errors(Command(rate=1.0)) == ["rate must be in [0, 1), got 1.0"]
    assert parse(Named(), ["x"], "prog") == Named("x")
    assert parse(Named("gpt2"), [], "prog") == Named("gpt2")
    for default, args, error in (
        (Command(), ["--precision", "a,c"], "--precision must be a or b, got 'c'; see prog --help"),
        (Named(), [], "the following arguments are required: CASE; see prog --help"),
        (Named(), ["x", "y"], "unrecognized arguments: y; see prog --help"),
    ):
        with pytest.raises(UserError) as raised:
            parse(default, args, "prog")
        assert str(raised.value) == error


@given(st.integers(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"), min_size=1))
def test_values_are_read_as_they_were_written(count: int, factor: float, name: str) -> None:
    args = [f"--count={count}", "--factor", repr(factor), f"--name={name}"]
    if name == "--":
        with pytest.raises(UserError, match="--name must not be --"):
            parse(Everything(), args, "prog")
        return
    found = parse(Everything(), args, "prog")
    assert (found.count, found.factor, found.name) == (count, factor, name)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("--count 1.5", "--count must be an integer, got '1.5'; see prog --help"),
        ("--count 1e3", "--count must be an integer, got '1e3': use 1000; see prog --help"),
        ("--factor x", "--factor must be a number, got 'x'; see prog --help"),
        ("--chosen z", "--chosen must be x, y or 2, got 'z'; see prog --help"),
        ("--rate x", "--rate must be a number, got 'x'; see prog --help"),
        ("--sizes 1 x", "--sizes must be an integer, got 'x'; see prog --help"),
        ("--auto manual", "--auto must be auto, or without a value, got 'manual'; see prog --help"),
        ("--count", "--count needs a value; see prog --help"),
        ("--on=yes", "--on takes no value; see prog --help"),
        ("--count=", "--count is empty: give it a value, or leave it out"),
        ("--cuont 3 x", "unrecognized arguments: --cuont 3 x, did you mean --count; see prog --help"),
        ("--coun 3", "unrecognized arguments: --coun 3, did you mean --count; see prog --help"),
    ],
)
def test_a_mistake_is_one_line(args: str, error: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(Everything(), args.split(), "prog")
    assert str(raised.value) == error


def test_the_help_has_each_flag_its_default_and_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Everything(), ["--help"], "prog")
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage: prog [OPTIONS] A field of each type. options:" in shown
    assert "--count INT Number of things, 100% of them. (default: 3, at least 1)" in shown
    assert "--rate FLOAT (default: None, in [0, 1))" in shown
    assert "--port [PORT] (default: None)" in shown
    assert "--chosen {x,y,2} (default: x)" in shown


def test_arguments_of_another_parser_are_returned_in_their_order() -> None:
    found, rest = parse_known(Everything(), ["--width", "3", "--count", "2", "--lr=0.1", "--help"], "prog")
    assert (found.count, rest) == (2, ["--width", "3", "--lr=0.1", "--help"])


@dataclass(frozen=True)
class Options:
    """Options of a command."""

    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Clashing(Recipe):
    """A recipe with a field of an option's name."""

    out: int = 1


@dataclass(frozen=True, kw_only=True)
class Unwritable(Recipe):
    """A recipe with a field that no word stands for."""

    table: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Own(Recipe):
    """A recipe of one's own."""

    steps: int = 5
    heads: Annotated[int, at_least(2), at_most(8), Bound(lambda x: x % 2 == 0, "be even", "use 4")] = 4


def test_a_recipe_of_ones_own_has_bounds() -> None:
    assert field_errors(Own()) == []
    assert field_errors(Own(heads=3)) == ["heads must be even, got 3: use 4"]
    assert field_errors(Own(heads=1, steps=0)) == ["steps must be at least 1, got 0", "heads must be at least 2, got 1"]
    options, recipe = parse_both(Options(), Own(), ["--out", "x", "--heads", "6"], "prog", None)
    assert (options.out, recipe.heads, recipe.steps) == (Path("x"), 6, 5)


def test_fields_that_cannot_be_flags_are_refused() -> None:
    with pytest.raises(UserError, match=r"Clashing.out has the name of a flag of prog: rename it"):
        parse_both(Options(), Clashing(), [], "prog", None)
    with pytest.raises(UserError, match=r"Unwritable.table has the type dict\[str, int\], which no flag can have"):
        parse(Unwritable(), [], "prog")


@pytest.mark.parametrize("name", RECIPES)
def test_each_number_of_a_built_in_recipe_has_a_bound_and_each_field_a_help(name: str) -> None:
    kind: Any = type(RECIPES[name])
    docs, limits = field_docs(kind), bounds(kind)
    for field, hint in get_type_hints(kind).items():
        if field in {x.name for x in dataclasses.fields(kind)}:
            assert docs.get(field), field
            assert {int, float}.isdisjoint({hint, *get_args(hint)}) or field in limits, field
