"""Both sides use the same weights, micro-batches and skips, and refuse invalid settings."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.models import MLP, functional
from jaxtrain.models.mlp import torch_names
from parity.case import AdamW, Case
from parity.cases.built_in.image_batches import images, loss_fn, torch_loss
from parity.run import check
from parity.sides import jax_side, torch_side


def small(magnitude: float = 1.0) -> Case:
    """Return a case of a perceptron 6-5-3 on images of that magnitude."""
    apply, params_like = functional(nnx.eval_shape(lambda: MLP((6, 5, 3), rngs=nnx.Rngs(0))))
    noise = images(2, 3, classes=3)
    return Case(
        name="small",
        torch_model=lambda: torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
        ),
        torch_loss=torch_loss,
        loss_fn=loss_fn(apply),
        params_like=params_like,
        names=torch_names(2),
        batch=lambda seed, rows: {**noise(seed, rows), "image": noise(seed, rows)["image"] * np.float32(magnitude)},
        rows=8,
        optimizer=AdamW(lr=1e-2),
        clip_norm=1.0,
    )


def test_batches_differ_by_step_and_seed_and_are_reproducible() -> None:
    case = small()
    drawn = [batch["image"] for seed in (0, 1) for batch in case.batches(seed, 3)]
    assert len({image.tobytes() for image in drawn}) == 6
    again = [batch["image"] for seed in (0, 1) for batch in case.batches(seed, 3)]
    np.testing.assert_array_equal(drawn, again)


def test_a_batch_that_is_a_view_is_contiguous_in_pytorch() -> None:
    case = small()

    def views(seed: int, rows: int) -> dict[str, np.ndarray]:
        batch = case.batch(seed, rows)
        wider = np.concatenate([batch["label"][:, None]] * 3, axis=1)
        return {"image": np.asfortranarray(batch["image"]), "label": wider[:, :-1]}

    def torch_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return case.torch_loss(model, {"image": batch["image"].view(-1, 6), "label": batch["label"].view(-1)[::2]})

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return case.loss_fn(params, {**batch, "label": batch["label"][:, 0]}, rng)

    viewed = dataclasses.replace(case, batch=views, torch_loss=torch_loss, loss_fn=loss_fn, names=None)
    verdict = check(viewed, steps=2)
    assert verdict.passed, verdict.faults


def test_a_batch_drawn_in_float64_is_used_in_float32() -> None:
    case = small()
    drawn = dataclasses.replace(
        case,
        batch=lambda seed, rows: {
            name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in case.batch(seed, rows).items()
        },
    )
    narrow, wide = (torch_side.run(one, "fp32", steps=2, seed=0) for one in (case, drawn))
    np.testing.assert_array_equal(wide.losses, narrow.losses)
    assert check(drawn, "fp32", steps=2).passed


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_both_sides_start_from_the_same_float32_weights(precision: str) -> None:
    case = dataclasses.replace(small(), optimizer=AdamW(lr=0.0))
    weights = torch_side.initial_weights(case, seed=3)
    ours = jax_side.run(case, weights, precision, steps=1, seed=3)
    theirs = torch_side.run(case, precision, steps=1, seed=3)
    for name, weight in weights.items():
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(ours.last.params[name], weight)
        np.testing.assert_array_equal(theirs.last.params[name], weight)


def test_reordering_and_splitting_rows_does_not_change_the_results() -> None:
    plain = torch_side.run(small(), "fp64", steps=3)
    for other in (
        torch_side.run(small(), "fp64", steps=3, variant=torch_side.Variant(reorder=1), accumulate=k) for k in (1, 2, 8)
    ):
        np.testing.assert_allclose(other.losses, plain.losses, rtol=1e-12)
        np.testing.assert_allclose(other.last.params["1.weight"], plain.last.params["1.weight"], rtol=1e-9)


def test_a_step_that_overflows_is_skipped_by_both_sides_and_the_float64_run() -> None:
    case = small(magnitude=30.0)
    theirs = torch_side.run(case, "fp16")
    assert 0 in theirs.skipped
    assert len(theirs.skipped) < 20
    ours = jax_side.run(case, torch_side.initial_weights(case, 0), "fp16")
    np.testing.assert_array_equal(ours.scales, theirs.scales)
    assert np.isfinite(ours.grads["1.weight"]).all()
    verdict = check(case, "fp16")
    assert verdict.passed, verdict.faults


def test_a_run_of_overflows_only_fails() -> None:
    verdict = check(small(magnitude=1e8), "fp16", steps=2)
    assert not verdict.passed


def test_micro_batches_of_different_weights_raise() -> None:
    def of_the_first_class(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return torch_loss(model, batch)[0], int((batch["label"] == 0).sum())

    with pytest.raises(UserError, match="micro-batches of small have weights"):
        torch_side.run(dataclasses.replace(small(), torch_loss=of_the_first_class), "fp32", accumulate=4)


def test_a_parameter_the_loss_does_not_reach_is_recorded_as_zeros() -> None:
    def model() -> torch.nn.Module:
        made = small().torch_model()
        made.idle = torch.nn.Linear(2, 2)
        made.forward = lambda x: made[3](made[2](made[1](made[0](x))))
        return made

    run = torch_side.run(dataclasses.replace(small(), torch_model=model), "fp32", steps=1)
    assert not run.grads["idle.weight"].any()
    assert not run.last.moments["exp_avg"]["idle.weight"].any()


def test_every_tensor_has_a_counterpart_of_its_shape() -> None:
    case = small()

    def with_layers(*sizes: int) -> Case:
        layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]
        relus = [torch.nn.ReLU() for _ in layers]
        modules = [module for pair in zip(layers, relus, strict=True) for module in pair]
        return dataclasses.replace(case, torch_model=lambda: torch.nn.Sequential(torch.nn.Flatten(), *modules))

    with pytest.raises(UserError, match=r"unexpected 5\.bias; unexpected 5\.weight"):
        check(with_layers(6, 5, 3, 3))
    with pytest.raises(UserError, match=r"missing 3\.bias; missing 3\.weight"):
        check(with_layers(6, 5))
    with pytest.raises(UserError, match=r"mis-shaped 1\.weight: \(4, 6\) for .* \(6, 5\)"):
        check(with_layers(6, 4, 3))
    one_short = NameTable({path: TorchParam(p.name) for path, p in list(case.names.params.items())[1:]})
    with pytest.raises(UserError, match="without an entry"):
        check(dataclasses.replace(case, names=one_short))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"precision": "int8"}, "unknown precision 'int8': choose one of fp64, fp32, bf16, fp16"),
        ({"accumulate": 3}, "the 8 rows of small are not divisible by accumulate 3: use one of 1, 2, 4, 8"),
        ({"accumulate": 0}, "not divisible by accumulate 0: use one of 1, 2, 4, 8"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"remat": "some"}, "remat 'some' is unknown"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        check(small(), **settings)


def noisy(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, weight = small().torch_loss(model, batch)
    return total + torch.randperm(2).sum() * 0, weight


def by_row(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, weight = small().torch_loss(model, batch)
    return total[None], weight


@pytest.mark.parametrize(
    ("torch_loss", "expected"),
    [
        (noisy, "the PyTorch model draws random numbers by aten.randperm"),
        (by_row, r"torch_loss returned a total of shape \[1\]: return the sum"),
        (
            lambda model, batch: small().torch_loss(model, batch)[0],
            r"torch_loss returned Tensor: return \(total, weight\)",
        ),
    ],
)
def test_a_loss_that_cannot_be_compared_raises(torch_loss: Any, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        check(dataclasses.replace(small(), torch_loss=torch_loss), steps=1)
