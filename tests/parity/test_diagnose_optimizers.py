"""Each convention of clipping and of an optimizer, planted in the JAX side of a small case, is diagnosed."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jaxtrain
from jaxtrain.interop import NameTable, TorchParam
from parity.case import Case
from parity.explain import stages as stagewise
from parity.explain.conventions.clipping import CLIPPING
from parity.explain.conventions.optimizers import DIRECTIONS, OPTIMIZERS, recipes
from parity.explain.diagnose import Diagnosis
from parity.explain.stages import stages
from parity.optimizer import Optimizer
from tests.parity.diagnosed_cases import ROWS, SGD, diagnosed

# Of a leaf, by the norm of all and the bound.
CLIPPED: dict[str, Callable[[jax.Array, jax.Array, float], jax.Array]] = {
    "factor has no 1e-6": lambda g, norm, bound: g * jnp.minimum(bound / norm, 1),
    "norm is each leaf's": lambda g, norm, bound: g * jnp.minimum(bound / (jnp.sqrt((g**2).sum()) + 1e-6), 1),
    "clipping is by value": lambda g, norm, bound: jnp.clip(g, -bound, bound),
    "gradients are not clipped": lambda g, norm, bound: g,
    "factor may be over 1": lambda g, norm, bound: g * bound / (norm + 1e-6),
    "bound is for the norm's square": lambda g, norm, bound: g * jnp.minimum(bound**0.5 / (norm + 1e-6), 1),
}


@pytest.mark.parametrize("has", CLIPPED)
def test_a_convention_of_clipping_is_diagnosed(has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def clipped(grads: Any, bound: float) -> Any:
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: CLIPPED[has](g, norm, bound), grads), None

    assert [x.has for x in CLIPPING] == [*CLIPPED]
    tiny = two_leaves(clip_norm=1e4 if has == "factor may be over 1" else 2.0)
    monkeypatch.setattr(stagewise, "clip_grad_norm", clipped)
    found = diagnosed(tiny)
    assert (found and found.has) == has


def test_an_unknown_clipping_has_no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagewise, "clip_grad_norm", lambda grads, bound: (jax.tree.map(jnp.tanh, grads), None))
    assert diagnosed(two_leaves(clip_norm=2.0)) is None


class Leaves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(5) + 0.5)
        self.b = torch.nn.Parameter(torch.rand(5))


def two_leaves(optimizer: Any = SGD, clip_norm: float | None = None) -> Case:
    """A small regression."""

    def loss_of(w: Any, b: Any, x: Any) -> Any:
        return ((w * x + b) ** 2 * x).sum()

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return jaxtrain.Loss(loss_of(params["w"], params["b"], batch["x"]), weight=ROWS), {}

    return Case(
        name="leaves",
        torch_model=Leaves,
        torch_loss=lambda model, batch: (loss_of(model.w, model.b, batch["x"]), ROWS),
        loss_fn=loss_fn,
        params_like={name: jax.ShapeDtypeStruct((5,), np.float32) for name in "wb"},
        names=NameTable({name: TorchParam(name) for name in "wb"}),
        batch=lambda seed, rows: {"x": np.random.default_rng(seed).standard_normal((rows, 5), np.float32)},
        rows=ROWS,
        optimizer=optimizer,
        clip_norm=clip_norm,
    )


def exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


T = torch.optim
THEIRS: dict[str, Callable[..., Any]] = {
    "Adadelta": partial(T.Adadelta, rho=0.8, eps=1e-3, lr=0.1),
    "Adagrad": partial(T.Adagrad, lr=0.1, lr_decay=0.1, eps=1e-3, weight_decay=0.2),
    "Adam": partial(T.Adam, lr=0.1, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2, amsgrad=True, maximize=True),
    "AdamW": partial(T.AdamW, lr=0.1, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2),
    "Adamax": partial(T.Adamax, lr=0.1, betas=(0.7, 0.8), eps=1e-3),
    "NAdam": partial(T.NAdam, lr=0.1, betas=(0.7, 0.8), eps=1e-3),
    "RAdam": partial(T.RAdam, lr=0.1, betas=(0.7, 0.8), eps=1e-3),
    "RMSprop": partial(T.RMSprop, lr=0.1, alpha=0.8, eps=1e-3, momentum=0.7, centered=True),
    "Rprop": partial(T.Rprop, lr=0.1),
    "SGD": partial(T.SGD, lr=0.1, momentum=0.7, dampening=0.4, weight_decay=0.2),
}
NESTEROV = partial(T.SGD, lr=0.1, momentum=0.7, nesterov=True)
UNDAMPED = partial(T.SGD, lr=0.1, momentum=0.7)


def grouped(params: Any) -> Any:
    (_, w), (_, b) = params
    return T.AdamW([{"params": [("w", w)], "weight_decay": 0.3}, {"params": [("b", b)], "weight_decay": 0.0}], lr=0.1)


SPECIAL: dict[str, Callable[..., Any]] = {
    "momentum is not Nesterov's": NESTEROV,
    "buffer is an average (optax.ema)": UNDAMPED,
    "momentum is Nesterov's": UNDAMPED,
    "weight decay is the first group's in all": grouped,
}
"""PyTorch's optimizer for conventions without effect on the optimizer of that kind in `THEIRS`."""


def rows() -> list[tuple[str, str]]:
    return [(kind, c.has) for c in OPTIMIZERS for kind in (c.of or ("AdamW", "SGD"))]


def as_planted(theirs: Any, scheduler: Any, options: Any) -> Case:
    """Return a case whose JAX optimizer has other options than PyTorch's."""
    made = theirs(list(Leaves().named_parameters()))
    found = recipes(made, scheduler and scheduler(made), 12)
    named = {name: recipe.but(options, found[0][0].options) for recipe, names in found for name in names}
    ours = optax.partition({name: recipe.transformation() for name, recipe in named.items()}, {n: n for n in named})
    return two_leaves(Optimizer("planted", theirs, ours, scheduler=scheduler))


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_a_recipe_equals_pytorchs_optimizer(kind: str) -> None:
    scheduled = None if kind == "Rprop" else exponential
    for scheduler in (None, scheduled):
        tiny = as_planted(THEIRS[kind], scheduler, {})
        found = diagnosed(tiny)
        if kind == "NAdam":
            assert found is not None
            assert found.has == "product of momenta is exact"
            assert 1e-10 < found.before < 1e-7
        else:
            assert all(stage.holds for stage in stages(tiny))
            assert found is None


def has_effect(kind: str, has: str) -> bool:
    """Return whether the convention has an effect on PyTorch's optimizer of that kind."""
    return not (
        (has == "weight decay is decoupled" and kind == "AdamW")
        or (has == "weight decay is in the gradient" and kind == "SGD")
        or (has == "weight decay is the first group's in all" and kind == "SGD")
        or (has in ("gradient is descended",))
        or (has in ("maximum is of the corrected moments", "amsgrad is off") and kind == "AdamW")
        or (kind == "RMSprop" and has == "momentum is Nesterov's")
    )


@pytest.mark.parametrize(("kind", "has"), [row for row in rows() if has_effect(*row)])
def test_a_convention_of_an_optimizer_is_diagnosed(kind: str, has: str) -> None:
    (convention,) = (c for c in OPTIMIZERS if c.has == has and (not c.of or kind in c.of))
    theirs = SPECIAL.get(has, THEIRS[kind])
    found = diagnosed(as_planted(theirs, None if kind == "Rprop" else exponential, convention.options), steps=8)
    assert isinstance(found, Diagnosis)
    assert (found.subject, found.has) == (kind, has)


@pytest.mark.parametrize(("frozen", "why"), [(True, "requires_grad=False"), (False, "no gradient")])
def test_weight_decay_of_a_parameter_without_a_gradient_is_diagnosed(frozen: bool, why: str) -> None:
    class Partly(Leaves):
        def __init__(self) -> None:
            super().__init__()
            self.b.requires_grad_(not frozen)

    tiny = as_planted(THEIRS["AdamW"], None, {})

    def torch_loss(model: Any, batch: Any) -> Any:
        return ((model.w * batch["x"] + model.b.detach()) ** 2).sum(), ROWS

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            out = params["w"] * batch["x"] + jax.lax.stop_gradient(params["b"])
        return jaxtrain.Loss((out**2).sum(), weight=ROWS), {}

    found = diagnosed(dataclasses.replace(tiny, torch_model=Partly, torch_loss=torch_loss, loss_fn=loss_fn))
    assert str(found) == (f"b has {why} in PyTorch; AdamW's weight decay changes it in JAX: decay the others only")


def test_descent_instead_of_ascent_is_diagnosed() -> None:
    found = diagnosed(as_planted(THEIRS["Adam"], None, {"maximize": False}), steps=5)
    assert isinstance(found, Diagnosis)
    assert found.has == "gradient is descended"


def rate(count: Any) -> Any:
    return 0.1 * 0.7**count


@pytest.mark.parametrize(
    ("theirs", "scheduler", "ours", "has"),
    [
        (partial(T.Adam, lr=0.1, eps=1e-3), None, optax.adam(0.1, eps=0, eps_root=1e-3), "eps is inside the root"),
        (partial(T.AdamW, lr=0.1), None, optax.adamw(0.1), "weight_decay is 0.0001"),
        (
            partial(T.Adam, lr=0.1, weight_decay=0.1),
            None,
            optax.adamw(0.1, weight_decay=0.1),
            "weight decay is decoupled",
        ),
        (
            partial(T.Adam, lr=0.1, betas=(0.9, 0.5), amsgrad=True),
            None,
            optax.amsgrad(0.1, b2=0.5),
            "maximum is of the corrected moments",
        ),
        (partial(T.RMSprop, lr=0.1), None, optax.rmsprop(0.1), "eps is inside the root, its decay is 0.9"),
        (
            partial(T.RMSprop, lr=0.1, momentum=0.9),
            exponential,
            optax.rmsprop(rate, decay=0.99, momentum=0.9, eps_in_sqrt=False),
            "learning rate is inside the buffer",
        ),
        (
            partial(T.Adagrad, lr=0.1),
            None,
            optax.adagrad(0.1),
            "sums start at 0.1, its eps is inside the root, its eps is 1e-7",
        ),
        (partial(T.NAdam, lr=0.1), None, optax.nadam(0.1), "momentum has no schedule"),
        (partial(T.RAdam, lr=0.1, betas=(0.9, 0.9)), None, optax.radam(0.1, b2=0.9), "eps is added after"),
        (partial(T.Rprop, lr=0.1), None, optax.rprop(0.1), "first update does not move"),
        (
            partial(T.SGD, lr=0.1, momentum=0.9, dampening=0.9),
            None,
            optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1)),
            "first gradient is damped",
        ),
        (partial(T.SGD, lr=0.1), exponential, optax.sgd(lambda count: rate(count + 1)), "schedule is one update ahead"),
        (partial(T.SGD, lr=0.1), None, optax.sgd(0.11), None),
        (partial(T.AdamW, lr=0.1), None, optax.lion(0.1), None),
        (partial(T.ASGD, lr=0.1), None, optax.sgd(0.2), None),
    ],
)
def test_conventions_of_optaxs_optimizers_are_diagnosed(
    theirs: Any, scheduler: Any, ours: Any, has: str | None
) -> None:
    found = diagnosed(two_leaves(Optimizer("optax", theirs, ours, scheduler=scheduler)), steps=8)
    assert found is None if has is None else has in str(found)
