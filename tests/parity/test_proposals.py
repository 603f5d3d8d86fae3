"""What decides a proposed table: names that both sides share, then values, then order; and what is said of doubts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtrain
from jaxtrain.errors import UserError
from jaxtrain.interop import Layout
from parity import check
from parity.case import AdamW, Case
from parity.cases import CASES
from parity.run import examine
from parity.weights import Proposal, proposal_of
from parity.weights.assignment import Side, Unit
from parity.weights.classes import by_class
from parity.weights.name_evidence import CONTRADICTED, Name, name_prices

WIDTH = 5


def prices(units: list[str], leaves: list[str]) -> np.ndarray:
    fits = np.ones((len(units), len(leaves)), bool)
    return name_prices([*map(Name.read, units)], [*map(Name.read, leaves)], fits, ["same shape"] * len(units))


@pytest.mark.parametrize(
    ("units", "leaves"),
    [
        (["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp/gate_proj/kernel", "mlp/up_proj/kernel"]),
        (["layers.0.fc.weight", "layers.1.fc.weight"], ["layers/0/linear/kernel", "layers/1/linear/kernel"]),
        (["h.9.fc.weight", "h.10.fc.weight"], ["h_9/kernel", "h_10/kernel"]),
        (["norm.weight", "norm.bias"], ["LayerNorm_0/scale", "LayerNorm_0/bias"]),
        (["a.out.norm.weight", "b.norm.weight"], ["a/out/norm/scale", "b/norm/scale"]),
    ],
)
def test_names_that_both_sides_share_are_not_exchanged(units: list[str], leaves: list[str]) -> None:
    found = prices(units, leaves)
    assert (np.diag(found) < 0.1).all()
    assert (found[~np.eye(2, dtype=bool)] >= CONTRADICTED).all()


def test_names_of_one_side_only_leave_the_decision_to_values() -> None:
    found = prices(["attn.query.weight", "attn.key.weight"], ["attn/a/kernel", "attn/b/kernel"])
    assert (found < 0.1).all()


class Layers(torch.nn.Module):
    """Two layers of equal shapes, a mask and a scalar buffer that JAX has no counterpart of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))
        self.register_buffer("masked", torch.tensor(-1e4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[1](torch.relu(self.layers[0](x)) * 2)
        return self.first(y) + self.second(y)


def layers_loss(order: tuple[int, int], scale: float = 2.0, names: tuple[str, str] = ("first", "second")) -> Any:
    def norm(x: jax.Array, p: Any) -> jax.Array:
        return jax.nn.standardize(x, epsilon=1e-5) * p["scale"][None] + p["bias"][None]

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        del rng
        a, b = (params["layers"][str(i)] for i in order)
        y = jax.nn.relu(batch["x"] @ a["kernel"] + a["bias"][None]) * scale
        y = y @ b["kernel"] + b["bias"][None]
        out = norm(y, params[names[0]]) + norm(y, params[names[1]])
        return jaxtrain.Loss(jnp.sum(jnp.sin(out * batch["y"])), weight=len(y)), {}

    return loss_fn


def layers_case(loss_fn: Any, names: tuple[str, str] = ("first", "second"), container: str = "layers") -> Case:
    row, square = jax.ShapeDtypeStruct((WIDTH,), np.float32), jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
    like: dict[str, Any] = {container: {str(i): {"kernel": square, "bias": row} for i in range(2)}}
    like |= {name: {"scale": row, "bias": row} for name in names}

    def batch(seed: int, rows: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal((rows, WIDTH), np.float32) for name in "xy"}

    return Case(
        name="layers",
        torch_model=Layers,
        torch_loss=lambda model, batch: ((model(batch["x"]) * batch["y"]).sin().sum(), len(batch["x"])),
        loss_fn=loss_fn,
        params_like=like,
        names=None,
        batch=batch,
        rows=4,
        optimizer=AdamW(lr=1e-2),
        clip_norm=None,
    )


def tensors(proposal: Proposal) -> dict[str, str]:
    return {path: param.name for path, param in proposal.names.params.items()}


def test_exchanged_layers_are_a_difference_and_not_another_table() -> None:
    right, swapped = (proposal_of(layers_case(layers_loss(order))) for order in ((0, 1), (1, 0)))
    assert tensors(right) == tensors(swapped)
    assert tensors(right)["layers/0/kernel"] == "layers.0.weight"
    assert swapped.notes[0].startswith(
        "layers/0/bias is layers.0.bias by its name, but the losses agree under random weights only if it is layers.1"
    )
    assert not any("only if" in note for note in right.notes)
    assert not check(layers_case(layers_loss((1, 0))), steps=2).passed


def test_an_arbitrary_choice_is_noted() -> None:
    names = ("n0", "n1")
    proposal = proposal_of(layers_case(layers_loss((0, 1), names=names), names))
    assert proposal.notes == (
        "first.bias and second.bias are interchangeable in the loss: which leaf is which was chosen by order",
        "first.weight and second.weight are interchangeable in the loss: which leaf is which was chosen by order",
    )
    # The scale and the bias of a norm stay together.
    assert tensors(proposal)["n0/scale"].partition(".")[0] == tensors(proposal)["n0/bias"].partition(".")[0]


def test_a_table_is_refused_if_the_models_differ_and_it_is_in_doubt() -> None:
    names = ("n0", "n1")
    with pytest.raises(UserError, match=r"differ under random weights .* n0/bias may be (first|second)\.bias or ") as e:
        proposal_of(layers_case(layers_loss((0, 1), scale=3.0, names=names), names))
    assert "\n" not in str(e.value)


def test_dropout_that_ignores_that_rng_is_none_is_named() -> None:
    names = ("n0", "n1")
    plain = layers_loss((0, 1), names=names)

    def dropped(params: Any, batch: Any, rng: Any) -> Any:
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
        return plain(params, {**batch, "x": jnp.where(keep, batch["x"], 0.0)}, rng)

    def needs_rng(params: Any, batch: Any, rng: Any) -> Any:
        return plain(params, batch, jax.random.split(rng))

    with pytest.raises(UserError, match="layers draws random numbers although rng is None, as in evaluation"):
        proposal_of(layers_case(dropped, names))
    with pytest.raises(UserError, match="calls loss_fn with rng=None: apply dropout only if rng is not None"):
        proposal_of(layers_case(needs_rng, names))


def test_models_that_differ_are_compared_if_names_leave_no_doubt() -> None:
    proposal = proposal_of(layers_case(layers_loss((0, 1), scale=3.0)))
    assert tensors(proposal)["layers/1/kernel"] == "layers.1.weight"
    assert proposal.notes[0].startswith("names were proposed; the losses differ under random weights: ")


def test_a_model_of_images_with_a_class_token_is_matched() -> None:
    written = CASES["vit"]()
    assert proposal_of(dataclasses.replace(written, names=None)) == Proposal(written.names, None)


class Rotary(torch.nn.Module):
    """A linear layer of positions with frequencies that are computed when the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        inv_freq = 1.0 / 10000 ** (torch.arange(WIDTH, dtype=torch.int64).float() / WIDTH)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.inv_freq, torch.Tensor)
        return self.dense(x) * torch.sin(100 * self.inv_freq)


def rotary_case(sines: Callable[[], Any]) -> Case:
    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        del rng
        out = (batch["x"] @ params["kernel"] + params["bias"][None]) * sines()[None]
        return jaxtrain.Loss(jnp.sum(jnp.sin(out * batch["y"])), weight=len(out)), {}

    row, square = jax.ShapeDtypeStruct((WIDTH,), np.float32), jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
    of_layers = layers_case(loss_fn)
    return dataclasses.replace(
        of_layers, name="rotary", torch_model=Rotary, params_like={"kernel": square, "bias": row}, optimizer=AdamW(1e-2)
    )


def angles(base: float = 10000.0) -> np.ndarray:
    return 100 / base ** (np.arange(WIDTH) / WIDTH)


def test_a_constant_that_pytorch_rounded_is_compared_in_float64() -> None:
    def computed() -> jax.Array:
        return jnp.sin(100 / 10000 ** (jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH))

    examination = examine(rotary_case(computed), steps=2)
    assert examination.verdict.passed, examination.verdict.faults
    assert examination.notes == ("inv_freq is rounded to float32 in PyTorch; compared in float64",)


def rounded_case(factor: float = 1.0) -> Case:
    """A case whose constants NumPy rounds."""
    return rotary_case(lambda: jnp.asarray((factor * np.sin(angles())).astype(np.float32)))


def test_a_constant_that_numpy_rounded_explains_a_difference_of_its_size() -> None:
    examination = examine(rounded_case(), steps=2)
    assert examination.verdict.passed, examination.verdict.faults
    *others, last = examination.notes
    assert others == ["inv_freq is rounded to float32 in PyTorch; compared in float64"]
    assert last.startswith("JAX's constants rounded to float32 explain the difference, ")


def test_a_wrong_constant_is_a_difference() -> None:
    wrong = rotary_case(lambda: jnp.asarray(np.sin(angles(10001.0)).astype(np.float32)))
    assert not examine(wrong, steps=2).verdict.passed


CACHED: list[torch.dtype] = []


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    """A constant that a model's file caches, whatever the precision of the run."""
    made = torch.arange(length).float() / 3
    CACHED.append(made.dtype)
    return made


class Cached(Rotary):
    """A model with a cached constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x) * positions(WIDTH)


def test_a_constant_cached_in_one_precision_is_not_used_in_another() -> None:
    case = rotary_case(lambda: jnp.arange(WIDTH, dtype=jnp.float32) / 3)
    case = dataclasses.replace(case, torch_model=Cached)
    positions(WIDTH)
    assert examine(case, steps=2).verdict.passed
    assert torch.float64 in CACHED, "the run did not use the cache"


def test_tensors_of_a_module_stay_together() -> None:
    shapes = {f"{module}.{kind}": (3,) * n for module in "ab" for kind, n in (("weight", 2), ("bias", 1))}
    like = {module: {"kernel": np.zeros((3, 3)), "bias": np.zeros(3)} for module in "xy"}

    def costs(side: Side, unit: Unit, path: str, layouts: list[Layout]) -> list[float]:
        crossed = (unit.name, path) in {("a.weight", "y/kernel"), ("b.weight", "x/kernel")}
        return [0.0 if crossed or "bias" in path else 0.9] * len(layouts)

    chosen = Side(shapes, like, {}, set()).assigned(costs)
    assert {path: match.unit.name for path, match in chosen.items()} == {
        **{"x/kernel": "b.weight", "x/bias": "b.bias"},
        **{"y/kernel": "a.weight", "y/bias": "a.bias"},
    }
    assert not any(match.rivals for match in chosen.values())


@pytest.mark.parametrize("owner", [torch.nn.Linear, None])
@pytest.mark.parametrize(("of_transpose", "source"), [(0.9, "LINEAR"), (0.5, "AS_IS")])
def test_a_square_kernel_has_the_layout_of_the_others_unless_values_contradict(
    owner: type | None, of_transpose: float, source: str
) -> None:
    shapes = {"fc.weight": (7, WIDTH), "proj.weight": (WIDTH, WIDTH)}
    like = {name.split(".")[0]: {"kernel": jnp.zeros(shape[::-1])} for name, shape in shapes.items()}
    side = Side(shapes, like, {} if owner is None else dict.fromkeys(shapes, owner), set())

    def costs(side: Side, unit: Unit, path: str, layouts: list[Layout]) -> list[float]:
        return [of_transpose if layout.source == "AS_IS" else 1.0 for layout in layouts]

    found = side.assigned(costs)
    assert found["proj/kernel"].layout.source == "AS_IS"
    assert side.assigned(by_class(costs, [(side, found)]))["proj/kernel"].layout.source == source
