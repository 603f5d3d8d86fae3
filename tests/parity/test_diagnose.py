"""Each convention of an operation, planted in the JAX side of a small case, is diagnosed; other bugs are not."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import jaxtrain
from jaxtrain.interop import NameTable, TorchParam
from parity.case import Case
from parity.cases.built_in import gpt2_case
from parity.explain.conventions.torch_functions import OPERATIONS, OperationConvention
from parity.explain.diagnose import diagnose
from parity.explain.locate import locate
from parity.explain.stages import run_stages
from tests.parity.diagnosed_cases import (
    ROWS,
    Scaled,
    case,
    diagnosed,
    weights,
)
from tests.parity.planted_conventions import (
    alone,
    elements,
    loss,
    normed,
    planted,
)
from tests.parity.test_locate import convolved, transformer

OF_BATCH_NORM = {
    "statistics are the running ones",
    "momentum is the old value's weight",
    "running variance is biased",
}
"""Conventions that need a case with buffers."""


def test_every_convention_of_operations_is_tested() -> None:
    rows = {(c.of, c.has) for c in OPERATIONS}
    assert len(rows) == len(OPERATIONS)
    assert rows - planted().keys() == {("batch_norm", has) for has in OF_BATCH_NORM}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("of", "has"), [*planted()])
def test_a_convention_of_an_operation_is_diagnosed(of: str, has: str) -> None:
    theirs, ours = planted()[of, has]
    found = diagnosed(case(theirs, ours), steps=1)
    assert found is not None
    assert (found.subject, found.has) == (of, has)
    assert found.before > 1e-10 >= found.after


def batch_normed(bug: str) -> Case:
    """Return `case` for a batch norm with its buffers."""

    def loss_fn(params: Any, batch: Any, rng: Any, state: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            x = batch["x"] * params["w"]
            mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3)), ROWS * 36
            old = bug == "momentum is the old value's weight"
            new = 0.9 if old else 0.1
            kept = var if bug == "running variance is biased" else var * n / (n - 1)
            after = {
                "mean": (1 - new) * state["mean"] + new * mean,
                "var": (1 - new) * state["var"] + new * kept,
                "count": state["count"] + 1,
            }
            if bug == "statistics are the running ones":
                mean, var = state["mean"], state["var"]
            out = (x - mean[:, None, None]) / jnp.sqrt(var[:, None, None] + 1e-5)
            return jaxtrain.Loss((out * weights(out.shape)).sum(), weight=ROWS), {}, after

    names = {"mean": "function.running_mean", "var": "function.running_var", "count": "function.num_batches_tracked"}
    shapes = {"mean": (3,), "var": (3,), "count": ()}

    class Normed(Scaled):
        def forward(self, batch: Any) -> Any:
            return self.function(batch["x"] * self.w)

    return dataclasses.replace(
        case(abs, abs),
        torch_model=lambda: Normed(torch.nn.BatchNorm2d(3, affine=False)),
        loss_fn=loss_fn,
        state_like={k: jax.ShapeDtypeStruct(s, np.int32 if k == "count" else np.float32) for k, s in shapes.items()},
        buffers=NameTable({k: TorchParam(name) for k, name in names.items()}),
    )


@pytest.mark.parametrize("bug", ["", *sorted(OF_BATCH_NORM)])
def test_a_convention_of_running_statistics_is_diagnosed(bug: str) -> None:
    found = diagnosed(batch_normed(bug))
    assert (found and found.has) == (bug or None)


@pytest.mark.parametrize(
    ("model", "bug", "has"),
    [
        (transformer, "biased variance", "layer_norm: JAX's variance is unbiased"),
        (transformer, "epsilon", "layer_norm: JAX's eps is 1e-6: epsilon=1e-5"),
        (transformer, "scale", "scaled_dot_product_attention: JAX's scores are not scaled"),
        (transformer, "mask", "scaled_dot_product_attention: JAX's mask shows the next position too"),
        (transformer, "softmax axis", None),  # positions masked in every head are NaN
        (transformer, "gelu", "gelu: JAX's is exact: approximate=True"),
        (transformer, "loss axis", None),
        (transformer, "residual", None),
        (transformer, "wrong backward", None),
        (transformer, "stopped gradient", None),
        (convolved, "unbiased", "batch_norm: JAX's variance is unbiased"),
        (convolved, "running variance", "batch_norm: JAX's running variance is biased"),
        (convolved, "padding", None),
        (convolved, "leaky", None),
        (convolved, "flatten order", None),
        (convolved, "", None),
    ],
)
def test_one_layer_of_a_model_is_diagnosed_where_it_is_located(model: Any, bug: str, has: str | None) -> None:
    planted = model(bug)
    found = diagnose(run_stages(planted, steps=2), locate(planted))
    assert found is None if has is None else str(found).startswith(has)


def test_a_convention_of_every_layer_is_diagnosed() -> None:
    planted = gpt2_case.case(dataclasses.replace(gpt2_case.CONFIG, layer_norm_epsilon=1e-6))
    found = diagnose(run_stages(planted, steps=1), locate(planted))
    assert str(found).startswith("layer_norm: JAX's eps is 1e-6: epsilon=1e-5 (")


def test_diagnosis_uses_the_micro_batches_and_dropout_of_the_check() -> None:
    planted = gpt2_case.case(dataclasses.replace(gpt2_case.CONFIG, layer_norm_epsilon=1e-6), dropout=0.1)
    found = diagnose(run_stages(planted, steps=2, accumulate=2, seed=5))
    assert (found and found.has) == "eps is 1e-06"


def test_a_convention_that_pytorch_refuses_is_logged_and_a_bug_in_the_harness_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(error: Exception) -> Callable[..., Any]:
        def computes(*_: Any) -> Any:
            raise error

        return computes

    run = run_stages(case(alone(F.gelu), alone(jax.nn.gelu)), steps=1)
    conventions = "parity.explain.conventions.torch_functions.OPERATIONS"
    refused = OperationConvention("gelu", "refused", "", raising(IndexError("dimension out of range")))
    monkeypatch.setattr(conventions, (refused,))
    with caplog.at_level("INFO", "parity.explain.diagnose"):
        assert diagnose(run) is None
    (line,) = caplog.messages
    assert line == "tiny: 1 conventions refused by PyTorch: ['gelu, refused: IndexError: dimension out of range']"
    monkeypatch.setattr(conventions, (OperationConvention("gelu", "buggy", "", raising(KeyError("a bug of ours"))),))
    with pytest.raises(KeyError, match="a bug of ours"):
        diagnose(run)


def test_a_correct_case_has_no_diagnosis() -> None:
    assert diagnosed(case(alone(F.gelu), alone(partial(jax.nn.gelu, approximate=False)))) is None


@pytest.mark.parametrize("factor", [1.1, 0.37, -1.0])
def test_an_unknown_fault_of_the_loss_has_no_diagnosis(factor: float) -> None:
    theirs = alone(lambda x: loss("mse_loss", F.layer_norm(x, (6,))))
    ours = alone(lambda x: factor * elements("mse_loss", normed(x, (3,), 1e-5)).mean())
    assert diagnosed(case(theirs, ours)) is None
