"""JAX's default promotion, as users have it, and a tiny run of each example."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain as jt


@dataclass(frozen=True)
class Chain:
    """A tiny run of an example."""

    recipe: jt.Recipe
    whole: Any
    params: list[Any]
    """The params before the first step and after each one."""


@pytest.fixture(autouse=True)
def users_may_promote():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    from tests.examples.test_examples import tiny

    made = {}

    def of(example):
        if example not in made:
            recipe, folder = tiny(example), tmp_path_factory.mktemp("examples") / "whole"
            params = [recipe.task().params]
            # Copied, because the arrays are donated to the next step.
            record = lambda step, metrics, state: params.append(jax.tree.map(np.array, state.params))  # noqa: E731
            made[example] = Chain(recipe, jt.fit(recipe, folder, quiet=True, on_step=record), params)
        return made[example]

    return of
