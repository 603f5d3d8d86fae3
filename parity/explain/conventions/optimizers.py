"""Conventions of optimizers: what the JAX counterpart of a PyTorch optimizer may do instead.

A `Recipe` describes an optimizer by options, which the conventions change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import optim
from jaxtrain.optim import average, squares, zeros

Options = Mapping[str, Any]
TOGETHER = 3
"""Largest number of conventions tried at once: the defaults of `optax.adagrad` differ in three."""


@dataclass(frozen=True)
class Recipe:
    """PyTorch's optimizer `kind` with the `options` of one parameter group, and the learning `rates` of its updates.

    >>> recipe = Recipe("SGD", {"weight_decay": 0.0, "decay": "coupled"}, [0.1])
    >>> updates, _ = (tx := recipe.transformation()).update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1))
    >>> round(float(updates[0]), 6)
    -0.1
    """

    kind: str
    options: Options
    rates: Sequence[float]

    def but(self, other: Options, first: Options) -> "Recipe":
        """Return a copy with `other` options; a function gets the own options and those of the `first` group."""
        new = {key: value(self.options, first) if callable(value) else value for key, value in other.items()}
        return Recipe(self.kind, {**self.options, **new}, self.rates)

    def transformation(self) -> optax.GradientTransformation:
        """Return the transformation: sign, decay, direction, momentum and learning rate, in the order of the
        options."""
        o = self.options
        decay, rate = optax.add_decayed_weights(o["weight_decay"]), optim.scale_by_learning_rate(self._rate)
        buffer = [_momentum(o)] if o.get("momentum") else []
        decoupled = [decay] if o["decay"] == "decoupled" else []
        return optax.chain(
            *([optax.scale(-1.0)] if o.get("maximize") else []),
            *([decay] if o["decay"] == "coupled" else []),
            DIRECTIONS[self.kind](o),
            *([*decoupled, rate, *buffer] if o.get("rate_inside") else [*buffer, *decoupled, rate]),
            *([optax.add_decayed_weights(-o["weight_decay"])] if o["decay"] == "undiminished" else []),
        )

    def _rate(self, count: jax.Array) -> jax.Array:
        at = jnp.clip(count + self.options.get("ahead", 0), 0, len(self.rates) - 1)
        return jnp.asarray(self.rates)[at]


@dataclass(frozen=True)
class OptimizerConvention:
    """A way in which JAX's counterpart of a PyTorch optimizer may differ.

    Attributes:
      of: Names of PyTorch's optimizers; empty for all.
      has: What JAX has instead.
      change: The change to make in JAX; "{eps}" stands for PyTorch's option of that name.
      options: The options of a `Recipe` that express it.
    """

    of: tuple[str, ...]
    has: str
    change: str
    options: Options


class _State(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any
    largest: Any


def _fresh(params: Any, filled: float = 0.0) -> _State:
    nu = jax.tree.map(lambda p: jnp.full_like(p, filled), params)
    return _State(jnp.zeros([], np.int32), zeros(params), nu, zeros(params))


def _adam(o: Options) -> optax.GradientTransformation:
    b1, b2, eps, place = o["b1"], o["b2"], o["eps"], o.get("eps_at", "outside")

    def correction(b: float, t: jax.Array) -> jax.Array:
        corrected = o.get("corrected", "double")
        if corrected == "float32":
            return (1 - jnp.float32(b) ** t.astype(np.float32)).astype(float)
        return 1 - b ** t.astype(float) if corrected else jnp.ones([])

    def update(grads: Any, state: _State, params: Any = None) -> tuple[Any, _State]:
        t = state.count + 1
        mu, nu = average(b1, state.mu, grads), average(b2, state.nu, squares(grads))
        of_mean, of_square = correction(b1, t), correction(b2, t)
        large = jax.tree.map(lambda v: v / of_square, nu) if o.get("amsgrad") == "corrected" else nu
        largest = jax.tree.map(jnp.maximum, state.largest, large)

        def direction(g: jax.Array, m: jax.Array, v: jax.Array, top: jax.Array) -> jax.Array:
            v = {"corrected": top, True: top / of_square}.get(o.get("amsgrad", False), v / of_square)
            m = b1 * m / correction(b1, t + 1) + (1 - b1) * g / of_mean if o.get("nesterov") else m / of_mean
            outside = 0.0 if place == "inside" else eps / jnp.sqrt(of_square) if place == "uncorrected" else eps
            return m / (jnp.sqrt(v + eps if place in ("inside", "both") else v) + outside)

        return jax.tree.map(direction, grads, mu, nu, largest), _State(t, mu, nu, largest)

    return optax.GradientTransformation(_fresh, update)


def _rmsprop(o: Options) -> optax.GradientTransformation:
    alpha, eps, inside = o["alpha"], o["eps"], o.get("eps_at") == "inside"

    def update(grads: Any, state: _State, params: Any = None) -> tuple[Any, _State]:
        mu, nu = average(alpha, state.mu, grads), average(alpha, state.nu, squares(grads))
        variance = jax.tree.map(lambda v, m: v - m * m, nu, mu) if o["centered"] else nu
        direction = jax.tree.map(lambda g, v: _over_root(g, v, eps, inside), grads, variance)
        return direction, state._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(lambda params: _fresh(params, o.get("initial_scale", 0.0)), update)


def _adagrad(o: Options) -> optax.GradientTransformation:
    def update(grads: Any, state: _State, params: Any = None) -> tuple[Any, _State]:
        total = jax.tree.map(lambda s, g: s + g * g, state.nu, grads)
        slower = 1 + state.count * o["lr_decay"]
        inside = o.get("eps_at") == "inside"
        direction = jax.tree.map(lambda g, s: _over_root(g, s, o["eps"], inside) / slower, grads, total)
        return direction, state._replace(count=state.count + 1, nu=total)

    return optax.GradientTransformation(lambda params: _fresh(params, o["initial_accumulator_value"]), update)


def _over_root(g: jax.Array, v: jax.Array, eps: float, inside: bool) -> jax.Array:
    return g / jnp.where(v + eps > 0, jnp.sqrt(v + eps), 1.0) if inside else g / (jnp.sqrt(v) + eps)


def _momentum(o: Options) -> optax.GradientTransformation:
    mu, undamped = o["momentum"], 1 - o.get("dampening", 0.0)

    def update(updates: Any, state: _State, params: Any = None) -> tuple[Any, _State]:
        fresh = jnp.where((state.count == 0) & (not o.get("damps_first")), 1.0, undamped)
        buffer = jax.tree.map(lambda b, u: mu * b + fresh * u, state.mu, updates)
        updated = jax.tree.map(lambda b, u: u + mu * b, buffer, updates) if o.get("nesterov") else buffer
        return updated, state._replace(count=state.count + 1, mu=buffer)

    return optax.GradientTransformation(_fresh, update)


def _nadam(o: Options) -> optax.GradientTransformation:
    if o["momentum_decay"] is None:
        return _adam({**o, "nesterov": True})
    return _descent(optim.nadam(1.0, o["b1"], o["b2"], o["eps"], momentum_decay=o["momentum_decay"]))


def _radam(o: Options) -> optax.GradientTransformation:
    factory = optax.radam if o.get("eps_at") == "corrected" else optim.radam
    return _descent(factory(1.0, o["b1"], o["b2"], o["eps"]))


def _rprop(o: Options) -> optax.GradientTransformation:
    if o.get("waits"):
        return _descent(optax.rprop(o["lr"], *o["etas"], *o["step_sizes"]))
    return _descent(optim.rprop(o["lr"], o["etas"], o["step_sizes"]))


def _descent(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optimizer, optax.scale(-1.0))


DIRECTIONS: dict[str, Callable[[Options], optax.GradientTransformation]] = {
    "Adadelta": lambda o: _descent(optim.adadelta(1.0, o["rho"], o["eps"])),
    "Adagrad": _adagrad,
    "Adam": _adam,
    "AdamW": _adam,
    "Adamax": lambda o: _descent(optim.adamax(1.0, o["b1"], o["b2"], o["eps"])),
    "NAdam": _nadam,
    "RAdam": _radam,
    "RMSprop": _rmsprop,
    "Rprop": _rprop,
    "SGD": lambda o: optax.identity(),
}

ADAMS = ("Adam", "AdamW")
BETAS = (*ADAMS, "NAdam", "RAdam", "Adamax")

OPTIMIZERS: tuple[OptimizerConvention, ...] = (
    OptimizerConvention(ADAMS, "eps is inside the root", "eps_root=0, eps={eps}", {"eps_at": "inside"}),
    OptimizerConvention(ADAMS, "eps is inside the root too", "eps_root=0", {"eps_at": "both"}),
    OptimizerConvention(ADAMS, "eps is added before the bias correction", "√v̂ + eps", {"eps_at": "uncorrected"}),
    OptimizerConvention(ADAMS, "moments have no bias correction", "divide by 1 - bᵗ", {"corrected": False}),
    OptimizerConvention(ADAMS, "bias correction is float32", "jaxtrain.optim.adamw", {"corrected": "float32"}),
    OptimizerConvention(
        *(ADAMS, "maximum is of the corrected moments", "jaxtrain.optim.adam(amsgrad=True)"),
        {"amsgrad": lambda own, _: own["amsgrad"] and "corrected"},
    ),
    OptimizerConvention(ADAMS, "amsgrad is off", "amsgrad={amsgrad}", {"amsgrad": False}),
    OptimizerConvention(ADAMS, "momentum is Nesterov's, as in optax.nadam", "nesterov=False", {"nesterov": True}),
    OptimizerConvention(
        *(("NAdam",), "product of momenta is exact", "nothing: PyTorch keeps it in float32"), {"mu_product": "float64"}
    ),
    OptimizerConvention(("NAdam",), "momentum has no schedule", "jaxtrain.optim.nadam", {"momentum_decay": None}),
    OptimizerConvention(
        ("RAdam",), "eps is added after the bias correction", "jaxtrain.optim.radam", {"eps_at": "corrected"}
    ),
    OptimizerConvention(("Rprop",), "first update does not move", "jaxtrain.optim.rprop", {"waits": True}),
    OptimizerConvention(("RMSprop",), "eps is inside the root", "eps_in_sqrt=False", {"eps_at": "inside"}),
    OptimizerConvention(("RMSprop",), "decay is 0.9", "decay={alpha}", {"alpha": 0.9}),
    OptimizerConvention(("RMSprop",), "average starts at 1", "initial_scale=0", {"initial_scale": 1.0}),
    OptimizerConvention(("RMSprop",), "average is not centered", "centered={centered}", {"centered": False}),
    OptimizerConvention(
        ("RMSprop", "SGD"), "learning rate is inside the buffer", "scale after trace", {"rate_inside": True}
    ),
    OptimizerConvention(("RMSprop", "SGD"), "momentum is 0", "momentum={momentum}", {"momentum": 0.0}),
    OptimizerConvention(("RMSprop", "SGD"), "momentum is Nesterov's", "nesterov=False", {"nesterov": True}),
    OptimizerConvention(("SGD",), "momentum is not Nesterov's", "nesterov=True", {"nesterov": False}),
    OptimizerConvention(("SGD",), "buffer is not damped", "dampening={dampening}", {"dampening": 0.0}),
    OptimizerConvention(("SGD",), "first gradient is damped", "the first gradient whole", {"damps_first": True}),
    OptimizerConvention(
        *(("SGD",), "buffer is an average (optax.ema)", "dampening={dampening}"),
        {"dampening": lambda own, _: own["momentum"], "damps_first": True},
    ),
    OptimizerConvention(
        *(("Adagrad",), "sums start at 0.1", "initial_accumulator_value={initial_accumulator_value}"),
        {"initial_accumulator_value": 0.1},
    ),
    OptimizerConvention(("Adagrad",), "eps is inside the root", "jaxtrain.optim.adagrad", {"eps_at": "inside"}),
    OptimizerConvention(("Adagrad",), "lr_decay is 0", "lr_decay={lr_decay}", {"lr_decay": 0.0}),
    *(
        OptimizerConvention((*BETAS, "RMSprop", "Adagrad", "Adadelta"), f"eps is {eps:g}", "eps={eps}", {"eps": eps})
        for eps in (1e-8, 1e-7, 1e-6, 1e-10, 1e-5, 1e-4)
    ),
    *(OptimizerConvention(BETAS, f"b1 is {b:g}", "b1={b1}", {"b1": b}) for b in (0.9, 0.95)),
    *(OptimizerConvention(BETAS, f"b2 is {b:g}", "b2={b2}", {"b2": b}) for b in (0.999, 0.99, 0.95, 0.98)),
    *(OptimizerConvention(("Adadelta",), f"rho is {rho:g}", "rho={rho}", {"rho": rho}) for rho in (0.9, 0.95)),
    OptimizerConvention((), "weight decay is decoupled", "an L2 penalty in the gradient", {"decay": "decoupled"}),
    OptimizerConvention((), "weight decay is in the gradient", "decoupled: adamw", {"decay": "coupled"}),
    OptimizerConvention(
        (), "weight decay is not times the learning rate", "weight_decay · lr", {"decay": "undiminished"}
    ),
    OptimizerConvention(
        *((), "weight decay is the first group's in all", "a mask, or jaxtrain.optim.groups"),
        {"weight_decay": lambda _, first: first["weight_decay"]},
    ),
    *(
        OptimizerConvention((), f"weight_decay is {decay:g}", "weight_decay={weight_decay}", {"weight_decay": decay})
        for decay in (0.0, 1e-4, 1e-2, 1e-1)
    ),
    OptimizerConvention((), "gradient is descended", "maximize={maximize}", {"maximize": False}),
    OptimizerConvention((), "schedule is one update ahead", "start its count at 0", {"ahead": 1}),
    OptimizerConvention((), "schedule is one update behind", "step it after every update", {"ahead": -1}),
    OptimizerConvention((), "learning rate is the first throughout", "the schedule", {"ahead": -(2**20)}),
)
"""Tried in this order, one at a time and then several at once. In a diagnosis, `has` follows "JAX's"."""


def recipes(optimizer: Any, scheduler: Any, steps: int) -> list[tuple[Recipe, list[str]]]:
    """Return the recipe and the parameter names of each parameter group; empty for an unknown optimizer.

    The optimizer and the scheduler are stepped for their learning rates and cannot be used afterwards.
    """
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if kind not in DIRECTIONS:
        return []
    options = [{k: v for k, v in group.items() if k not in ("params", "param_names", "lr")} for group in groups]
    rates: list[list[float]] = []
    for _ in range(steps + 1):  # one more, for a schedule that is one update ahead
        rates.append([float(group["lr"]) for group in groups])
        if scheduler is not None:
            optimizer.step()
            scheduler.step()
    found = []
    for group, o, lr in zip(groups, options, zip(*rates, strict=True), strict=True):
        o["b1"], o["b2"] = o.pop("betas", (0.0, 0.0))
        o.setdefault("weight_decay", 0.0)
        decoupled = o.pop("decoupled_weight_decay", False) or kind == "AdamW"
        o["decay"] = "decoupled" if decoupled else "coupled"
        o["initial_accumulator_value"] = optimizer.defaults.get("initial_accumulator_value", 0.0)
        o["lr"] = lr[0]
        found.append((Recipe(kind, o, [1.0] if kind == "Rprop" else lr), list(group["param_names"])))
    return found


def variants(of: Sequence[Recipe]) -> Iterator[tuple[tuple[OptimizerConvention, ...], list[Recipe]]]:
    """Yield the recipes of all groups under each convention that changes one of them, then under several at once."""
    first = of[0].options

    def under(*conventions: OptimizerConvention) -> list[Recipe]:
        other = {key: value for convention in conventions for key, value in convention.options.items()}
        return [recipe.but(other, first) for recipe in of]

    relevant = [c for c in OPTIMIZERS if (not c.of or of[0].kind in c.of) and under(c) != [*of]]
    for together in range(1, TOGETHER + 1):
        for conventions in combinations(relevant, together):
            if len({key for c in conventions for key in c.options}) == sum(len(c.options) for c in conventions):
                yield conventions, under(*conventions)
