"""Optimizers as text: formatting and parsing are inverse, and any other text is refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.optim.expression import OPTIMIZERS, SCHEDULES, Call, build_expression, format_expression, parse_expression

NUMBERS = st.one_of(st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
PLAIN = st.one_of(NUMBERS, st.none(), st.text(max_size=8), st.tuples(NUMBERS, NUMBERS))
NAMES = st.sampled_from(["lr", "b1", "eps", "milestones"])
CALLS = st.recursive(
    st.builds(Call, st.sampled_from(["sgd", "step_lr"]), st.dictionaries(NAMES, PLAIN, max_size=3)),
    lambda calls: st.builds(
        Call,
        st.sampled_from(["adamw", "sequential"]),
        st.dictionaries(NAMES, st.one_of(PLAIN, calls, st.lists(st.one_of(PLAIN, calls), max_size=3)), max_size=3),
    ),
    max_leaves=5,
)


@given(st.one_of(CALLS, st.dictionaries(st.text(min_size=1, max_size=8), CALLS, min_size=1, max_size=3)))
def test_a_formatted_expression_parses_to_the_same_expression(expression):
    again = parse_expression(format_expression(expression))
    assert again == expression
    assert format_expression(again) == format_expression(expression)


@pytest.mark.parametrize(
    "written",
    ["3", "", "sgd(", "sgd(0.1)", "sgd(**{})", "sgd(lr=open('/etc/passwd').read())", "(lambda: 1)()", "a.b(lr=1)",
     "{1: sgd}", "{'a': 3}", "sgd(lr=[x for x in (1,)])", "sgd(lr=1+1)", "x := sgd", "\0"],
)  # fmt: skip
def test_other_text_is_refused_in_one_line(written):
    with pytest.raises(jt.UserError) as error:
        build_expression(parse_expression(written), OPTIMIZERS, {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), lambda t: t])
def test_an_argument_that_cannot_be_written_as_text_is_refused(value):
    with pytest.raises(jt.UserError, match="cannot be written as text: use a schedule by name"):
        format_expression(Call("sgd", {"learning_rate": value}))


def test_every_public_optimizer_and_schedule_can_be_used_in_an_expression():
    public = {name for name in optim.__all__ if "learning_rate" in _parameters(getattr(optim, name))}
    assert public - {"rate_of_metric", "reduce_lr_on_plateau", "scale_by_learning_rate"} == set(OPTIMIZERS) - {
        "added",
        "at_turn",
        "clamped",
        "clipped",
    }
    own = {name for name, fn in vars(optim.schedules).items() if inspect.isfunction(fn) and name[0] != "_"}
    assert own - {"dataclass", "pairwise"} | {"rate_of_metric", "reduce_lr_on_plateau"} == set(SCHEDULES)


def _parameters(thing):
    return inspect.signature(thing).parameters if inspect.isfunction(thing) else {}


def test_groups_are_defined_by_paths_and_other_parameters_are_not_updated():
    tx = build_expression(
        parse_expression("{'a b/c': sgd(learning_rate=0.5), 'd': sgd(learning_rate=step_lr(lr=2.0, step_size=1))}"),
        OPTIMIZERS,
        {},
    )
    params = {"a": jnp.ones(1), "b": {"c": jnp.ones(1), "other": jnp.ones(1)}, "d": jnp.ones(1)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.map(float, jax.tree.map(np.squeeze, updates)) == {
        "a": -0.5,
        "b": {"c": -0.5, "other": 0.0},
        "d": -2.0,
    }
