"""Invalid settings: each raises a one-line error that names it, before anything is compiled or written."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtrain.cli import main
from jaxtrain.errors import UserError
from jaxtrain.optim.expression import OPTIMIZERS
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe
from jaxtrain.runner.preflight import check_settings

COUNT = int(os.environ.get("JAXTRAIN_FUZZ", "60"))
FIELDS = [(name, field.name) for name, recipe in RECIPES.items() for field in dataclasses.fields(recipe)]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
MALFORMED = st.sampled_from(
    [
        "", " ", "(", "nothing", "sgd(", "sgd(1)", "sgd(momentum='x')", "adamw(b1=1)",
        "adamw(b2=-0.5)", "adamw(eps='1')", "adamw(eps=-1e-8)", "adamw(nothing=1)", "__import__('os')", "sgd; sgd",
        "lambda: 0", "sgd(learning_rate=1e999)", "sgd(learning_rate=-1)", "{'a': 1}", "{1: sgd}", "[sgd]", "sgd()()",
        "sgd(**{})", "muon(ns_steps=0)", "step_lr(lr=0.1, step_size=0)", "step_lr(lr=0.1)",
        "step_lr(lr='x', step_size=1)",
        "multi_step_lr(lr=0.1, milestones=3)", "sequential(schedules=[], milestones=[])", "wsd(lr=0.1)", "full,",
        "dots:", "names:", "names:a,,b",
        "offload:", "dynamic_loss_scale(growth_factor=1)", "static_loss_scale(scale=0)",
        "static_loss_scale(scale='x')", "dynamic_loss_scale(growth_interval=0.5)", "\n", "é", "9" * 5000, "(" * 300,
    ]
)  # fmt: skip


def invalid_values(recipe: Any, field: str) -> st.SearchStrategy[str]:
    """Return a strategy of texts that are not valid values of the field."""
    hint = get_type_hints(type(recipe))[field]
    kinds = set(get_args(hint)) if get_origin(hint) not in (None, Literal) else {hint}
    numbers = st.sampled_from(["nan", "inf", "-inf", "-1", "1e400", "-1e-9", "1e39"])
    if int in kinds:
        may_be_zero = ("watch_precision", "warmup_steps", "seed", "allow_recompile", "keep_best", "workers")
        least = -1 if field in may_be_zero else 0
        integers = st.one_of(st.integers(max_value=least), st.integers(min_value=2**31)).map(str)
        return st.one_of(integers, numbers, st.sampled_from(["0.5", "1e3", "", "x", "१x", "None None"]))
    if float in kinds:
        return st.one_of(numbers, st.sampled_from(["", "x", "1,5", "0x", "--"]), st.floats(max_value=-1e-30).map(str))
    if get_origin(hint) is Literal:
        return TEXT.filter(lambda text: text not in get_args(hint) and not text.startswith("-"))
    if Path in kinds:
        return st.sampled_from(
            ["nowhere", "no/where.npz", "x" * 5000, "\x00", "a/\x00.npz", "😀.parquet", "/dev/null/x"]
        )
    if field in ("optimizer", "schedule", "loss_scale", "remat", "mesh"):
        return MALFORMED
    return st.nothing()  # a column may have any name; a boolean flag has no value


@st.composite
def invalid_flags(draw: st.DrawFn) -> tuple[str, str, str]:
    """Draw (recipe, field, invalid value)."""
    name, field = draw(st.sampled_from([(n, f) for n, f in FIELDS if not invalid_values(RECIPES[n], f).is_empty]))
    return name, field, draw(invalid_values(RECIPES[name], field))


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is created."""

    def compiled(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was created for invalid settings")

    for recipe in ("image", "language", "masked_language", "text_classification", "seq2seq"):
        monkeypatch.setattr(f"jaxtrain.recipes.{recipe}.functional", compiled)
    monkeypatch.setattr("jaxtrain.recipes.resnet.functional_with_state", compiled)


def refusal(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one-line error of a command."""
    before = sorted(Path().rglob("*"))
    assert main(args) == 2, args
    out, err = capsys.readouterr()
    assert err.count("\n") == 1, (args, err)
    assert err[:-1].isprintable(), (args, err)
    assert len(err) < 2000, (args, err)
    assert sorted(Path().rglob("*")) == before, args
    del out
    return err


def mentions(message: str, field: str) -> bool:
    """Return whether the message names the field, as a setting or as a flag."""
    return re.search(rf"\b{field}\b|--{field.replace('_', '-')}\b", message) is not None


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.usefixtures("nothing_compiled", "empty")
@pytest.mark.parametrize(
    "count",
    [COUNT // 4, COUNT // 2, pytest.param(3 * COUNT, marks=pytest.mark.nightly)],
)
def test_an_invalid_flag_is_refused_by_name(count, capsys):
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(invalid_flags())
    def check(case: tuple[str, str, str]) -> None:
        name, field, value = case
        message = refusal(["train", name, f"--{field.replace('_', '-')}={value}", "--out", "run"], capsys)
        assert mentions(message, field) or (field in ("data", "tokenizer") and value[:40] in message), message

    check()


@pytest.mark.usefixtures("nothing_compiled", "empty")
@pytest.mark.parametrize("value", ["\x1e\x85", "\u2028x", "a\n--\nb", "\r", "\x0b\x0c1", "\x1b[31m", "│", "-"])
def test_an_invalid_value_with_line_breaks_is_a_one_line_error(value, capsys):
    message = refusal(["train", "bert-keywords", f"--on-spike={value}"], capsys)
    assert "--on-spike must be stop or rollback, got " in message
    assert message.endswith("; see jaxtrain train bert-keywords --help\n")


WRONG: dict[Any, list[Any]] = {
    int: ["8", "x", 1.5, True, [], {}, -5, 2**40, math.nan, math.inf, None],
    float: ["0.1", True, [], {}, -1, math.nan, -math.inf, 1e300, 10**400, None],
    bool: [0, 1, "x", [], None],
    str: [0, 1.5, [], {}, True, None],
    Path: [3, [], {}, True, 0.5],
    Literal: ["x", "", 3, [], {}, None],
}


def invalid_configs() -> Iterator[tuple[str, str, Any]]:
    """Yield (recipe, field, value) of invalid values that a config.json could hold."""
    for name, field in FIELDS:
        hint = get_type_hints(type(RECIPES[name]))[field]
        kinds = {get_origin(hint)} if get_origin(hint) is Literal else set(get_args(hint)) or {hint}
        kind = next(kind for kind in WRONG if kind in kinds)
        yield from ((name, field, value) for value in WRONG[kind] if value is not None or type(None) not in kinds)


def write_config(name: str, field: str, value: Any) -> None:
    recipe = {k: None if v is None else str(v) if isinstance(v, Path) else v for k, v in vars(RECIPES[name]).items()}
    Path("run").mkdir(exist_ok=True)
    Path("run/config.json").write_text(json.dumps({"recipe": name, "settings": {**recipe, field: value}}))


@pytest.mark.usefixtures("empty")
def test_an_invalid_config_is_refused_with_the_name_of_the_setting():
    for name, field, value in invalid_configs():
        write_config(name, field, value)
        with pytest.raises(UserError) as raised:
            read_recipe(RunFolder(Path("run")))
        message = str(raised.value)
        assert mentions(message, field) or "run/config.json" in message, (name, field, value, message)


@pytest.mark.usefixtures("nothing_compiled", "empty")
def test_every_command_refuses_an_invalid_config(capsys):
    commands = ["train --resume --out run", "export run", "sample run", "eval run", "replay run 1"]

    @settings(max_examples=COUNT // 2, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(list(invalid_configs())), st.sampled_from(commands))
    def check(case: tuple[str, str, Any], command: str) -> None:
        write_config(*case)
        message = refusal(command.split(), capsys)
        assert mentions(message, case[1]) or "run/config.json" in message, (command, message)

    check()


def valid_values(recipe: Any, field: str) -> st.SearchStrategy[Any]:
    """Return a strategy of valid values of the field."""
    hint = get_type_hints(type(recipe))[field]
    if field in ("optimizer",):
        return st.sampled_from([*OPTIMIZERS, "sgd(momentum=0.9, nesterov=True)", "adamw(eps=1e-6, amsgrad=True)"])
    if field == "schedule":
        return st.sampled_from(
            [
                "wsd",
                "onecycle",
                "linear",
                "constant",
                "step_lr(lr=0.1, step_size=3)",
                "cosine_annealing_lr(lr=1, t_max=9)",
            ]
        )
    if field == "remat":
        return st.sampled_from(["none", "full", "dots", "dots_no_batch", "names:a,b"])
    if field == "loss_scale":
        return st.sampled_from([None, "static_loss_scale(scale=8.0)", "dynamic_loss_scale(growth_interval=9)"])
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if hint is bool:
        return st.booleans()
    if field in ("beta2", "dropout", "lora_dropout"):
        return st.floats(0, 1, exclude_max=True)
    if field == "ema":
        return st.none() | st.floats(0, 1, exclude_max=True)
    if field in ("masked", "validation_fraction"):
        return st.floats(0, 1, exclude_min=True, exclude_max=True)
    if field == "spike_factor":
        return st.none() | st.floats(1, 1e30, exclude_min=True)
    if field == "stall_seconds":
        return st.floats(0, 1e6)
    if float in (hint, *get_args(hint)):
        return st.floats(0.015625, 1e4, width=32) | st.sampled_from([1, 1e-30, 1e30])
    if field in ("n_layer", "num_hidden_layers", "num_layers", "depth"):
        return st.integers(1, 100)
    if int in (hint, *get_args(hint)):
        return st.integers(1, 2**20)
    return st.just(getattr(recipe, field))


@settings(max_examples=COUNT, deadline=None)
@given(st.data())
def test_valid_settings_are_accepted(data):
    name, field = data.draw(st.sampled_from(FIELDS))
    value = data.draw(valid_values(RECIPES[name], field))
    recipe = dataclasses.replace(RECIPES[name], **{field: value})
    if field == "accumulate":
        recipe = dataclasses.replace(recipe, batch_size=3 * value)
    if field == "watch_precision":  # of what 16 bits lose
        recipe = dataclasses.replace(recipe, precision="bf16")
    check_settings(recipe)


HUGE = {
    "digits-mlp --hidden 1048577": "hidden must be at most 1,048,576, got 1048577",
    "digits-resnet --width 1048576": "the parameters take 303,104.3 GiB",
    "gpt-stdlib --n-embd 16384 --n-layer 1000 --n-head 1": "the parameters take 12,000.8 GiB",
    "t5-dates --d-model 1048576": "the parameters take 229,377.1 GiB",
}


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("flags", HUGE)
def test_a_model_too_large_for_memory_is_refused_before_allocation(flags, capsys):
    assert HUGE[flags] in refusal(["train", *flags.split(), "--out", "run"], capsys)


@pytest.mark.usefixtures("empty")
def test_out_of_memory_is_a_one_line_error(monkeypatch, capsys):
    def exhausted(args: list[str]) -> int:
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory allocating 9 bytes\nmore")

    monkeypatch.setattr("jaxtrain.cli.sample.main", exhausted)
    assert main(["sample", "run"]) == 1
    assert capsys.readouterr().err == (
        "jaxtrain: out of memory (RESOURCE_EXHAUSTED: out of memory allocating 9 bytes): reduce batch_size or the "
        "model's size\n"
    )
    monkeypatch.setattr("jaxtrain.cli.sample.main", lambda args: {}["a bug"])
    with pytest.raises(KeyError):
        main(["sample", "run"])


@pytest.mark.usefixtures("empty")
def test_control_characters_in_an_error_are_escaped(capsys):
    assert "holds no run" in refusal(["sample", "\x1b[31mred\nline"], capsys)
