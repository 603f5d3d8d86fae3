"""Dicts reach a module in the order of the example batch, as in PyTorch, whatever order JAX's trees give them."""

import dataclasses
import random
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from jaxtrain.torch_import.source.emit import loaded

Tensor = torch.Tensor


class Pair(NamedTuple):
    """A container with fields."""

    later: Any
    earlier: Any


def tree_of(draw: random.Random, depth: int) -> Any:
    """Return a random tree of dicts with shuffled keys, lists, tuples and arrays."""
    kind = draw.choice(("array", *("dict", "ordered", "default", "list", "tuple", "pair", "dict") * (depth > 0)))
    if kind == "array":
        return np.float32(draw.choices(range(1, 9), k=2))
    items = [tree_of(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    if kind in ("list", "tuple"):
        return items if kind == "list" else tuple(items)
    if kind == "pair":
        return Pair(items[0], items[-1])
    keys = draw.sample(draw.choice((("b", "a", "c", "_z"), (7, 3, 0, -1))), len(items))
    pairs = dict(zip(keys, items, strict=True))
    return {"dict": pairs, "ordered": OrderedDict(pairs), "default": defaultdict(list, pairs)}[kind]


def shuffled(tree: Any, draw: random.Random) -> Any:
    """Return a tree with the keys of its dicts in another order; that of an OrderedDict is its own."""
    if isinstance(tree, dict):
        keys = [*tree] if isinstance(tree, OrderedDict) else draw.sample([*tree], len(tree))
        made = tree.copy()
        made.clear()
        made.update({key: shuffled(tree[key], draw) for key in keys})
        return made
    if isinstance(tree, Pair):
        return Pair(*(shuffled(x, draw) for x in tree))
    return type(tree)(shuffled(x, draw) for x in tree) if isinstance(tree, list | tuple) else tree


def folded(tree: Any, total: Any) -> Any:
    """Return a number that depends on the order and the types of a tree's containers."""
    if isinstance(tree, dict):
        for key, x in tree.items():
            total = folded(x, (total * 3 + len(str(key))) % 1009)
        return total + isinstance(tree, OrderedDict) + 2 * isinstance(tree, defaultdict)
    if isinstance(tree, list | tuple):
        for x in tree:
            total = folded(x, (total * 5 + isinstance(tree, list)) % 1009)
        return total
    return (total * 7 + tree) % 1009


class Folds(nn.Module):
    """Folds each tree, and returns the results in a dict whose keys are not sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, **trees: Any) -> dict[str, Any]:
        return {name: {1: folded(tree, self.w), 0: len(name)} for name, tree in trees.items()}


def in_torch(tree: Any) -> Any:
    """Return a tree of tensors, in its order."""
    if isinstance(tree, dict):
        made = tree.copy()
        made.update({key: in_torch(x) for key, x in tree.items()})
        return made
    if isinstance(tree, Pair):
        return Pair(*map(in_torch, tree))
    return type(tree)(map(in_torch, tree)) if isinstance(tree, list | tuple) else torch.tensor(tree)


@pytest.mark.parametrize("seed", range(40))
def test_dicts_have_the_examples_order(seed: int, tmp_path: Any) -> None:
    draw = random.Random(seed)
    names = draw.sample("zyxwvut", 7)
    example = {name: tree_of(draw, 3) for name in names} | {"factor": 2, "a": np.float32([1, 2])}
    if seed % 2:
        del example["factor"]
    module = Folds()
    expected = module(**{name: x if name == "factor" else in_torch(x) for name, x in example.items()})
    batch = shuffled({name: x for name, x in example.items() if name != "factor"}, draw)
    model = from_torch(module, example)
    given = {name: x for name, x in example.items() if name != "factor"}
    assert str(jax.tree.map(lambda x: 0, model.example)) == str(jax.tree.map(lambda x: 0, given))
    assert [*model.example] == [*given]
    outputs, _ = model(model.params, batch)
    assert [*outputs] == [*expected]
    assert [*outputs["a"]] == [1, 0]
    results = [outputs, jax.jit(model)(model.params, batch)[0]]
    text, _ = model.written()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        results.append(jax.jit(loaded(text, {}))(model.params, batch)[0])
    if not any(kind in repr(example) for kind in ("OrderedDict", "defaultdict", "Pair")):
        model.save(tmp_path / "saved")
        results.append(jax.jit(load_imported(tmp_path / "saved"))(model.params, batch)[0])
    for found in results:
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name][1], x[1].detach().numpy())


def test_a_batch_with_a_key_in_an_unknown_place_is_refused() -> None:
    module, x = Folds(), np.float32([1, 2])
    model = from_torch(module, {"t": {"b": x, "a": x}, "boxes": [{"y": x, "x": 2 * x}]})
    batch = {"t": {"a": x, "b": x}, "boxes": [{"y": x, "x": 2 * x}] * 3}
    outputs, _ = model(model.params, batch)
    expected = module(t=in_torch({"b": x, "a": x}), boxes=in_torch(batch["boxes"]))
    np.testing.assert_array_equal(outputs["boxes"][1], expected["boxes"][1].detach())
    with pytest.raises(UserError, match=r"the batch\['t'\] has the key 'c', which the example batch has not"):
        model(model.params, {**batch, "t": {"b": x, "c": x, "a": x}})


@dataclasses.dataclass
class Fields:
    """No container of JAX's trees."""

    ids: Any
    mask: Any


class Mapped(dict):  # type: ignore[type-arg]
    """A dict that JAX takes for a leaf."""


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"x": Fields(1, 2)}, r"the example\['x'\] is a Fields, .*module\(Fields\(\*\*batch\)\)$"),
        ({"x": Mapped(a=1)}, r"the example\['x'\] is a Mapped, .*convert it by dict\(…\)$"),
        ({"x": {"mode": "fast"}}, r"the example\['x'\]\['mode'\] is the string 'fast'"),
        ({"x": {"a": np.ones(2), 1: np.ones(2)}}, r"the example\['x'\] has keys of the types int and str, .*one type$"),
    ],
)
def test_examples_that_jax_does_not_take_are_refused(example: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_torch(Folds(), example)


def test_a_result_with_keys_of_two_types_is_refused() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": x, 0: x}

    with pytest.raises(UserError, match="the module returns a dict that has keys of the types int and str"):
        from_torch(Mixed(), np.ones(2, np.float32))
