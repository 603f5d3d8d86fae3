"""Parts of the harness that compute without a model equal what is computed by hand, by NumPy or by PyTorch."""

import dataclasses
import doctest
import importlib
import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional as F

import jaxtrain
from jaxtrain.errors import UserError
from jaxtrain.interop import (
    AS_IS,
    CONV,
    LINEAR,
    NameTable,
    TorchParam,
    bias_to_heads,
    linear_from_heads,
    linear_to_heads,
)
from jaxtrain.paths import none_frozen
from jaxtrain.program import rewrite
from parity import bundle
from parity.case import AdamW, Case, Outputs
from parity.cases import CASES, imported
from parity.cases.built_in import token_batches
from parity.cases.example_batches import Example
from parity.compare import activations, float64, outputs, quantized
from parity.compare.fingerprint import (
    NOISE,
    Fingerprint,
    Trace,
    ancestors,
    apart,
    approximations,
    constants_behind,
    correct,
    differing,
    edge,
    fingerprint,
    mask_fingerprint,
    nearest,
)
from parity.compare.low_precision import TRAININGS
from parity.compare.reference import Reference
from parity.divergence import Divergence
from parity.explain import diagnose, stages, torch_trace
from parity.explain.conventions.optimizers import _over_root
from parity.explain.conventions.variants import other_correction
from parity.explain.difference import arises
from parity.explain.locate import _Programs
from parity.explain.stages import Comparison, Stage
from parity.mutate import Mutant, Outcome, document, planting
from parity.oracle import in_jax, in_torch
from parity.oracle.float64_constants import recompute_constants
from parity.record import Record, Snapshot
from parity.selftest import products_check
from parity.selftest.check_result import CheckResult
from parity.settings import Settings
from parity.sides import frozen, jax_lines, param_rounding, torch_fp8
from parity.sides.nonfinite_loss import cause_of_nonfinite
from parity.sides.randomness import GivenMasks
from parity.unexercised import coverage, jax_selections, torch_selections
from parity.unexercised.selections import Selections
from parity.weights import proposal
from parity.weights.assignment import Side
from parity.weights.layouts import head_layouts, whole_layouts
from parity.weights.proof import _used


def test_padded_and_packed_batches_label_each_token_with_the_next_of_its_sequence() -> None:
    for seed in range(3):
        batch = token_batches.padded(seed, 9, 14, 50)
        assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(batch, (9, 14))
        for tokens, labels, positions, segments in zip(*batch.values(), strict=True):
            (real,) = np.nonzero(segments)
            assert segments.max() == 1
            assert len(real) == 14 - token_batches.PADDING
            assert (positions[real] == np.arange(len(real))).all()
            assert (labels[real[:-1]] == tokens[real[1:]]).all()
            assert (np.delete(labels, real[:-1]) == token_batches.IGNORED).all()
            assert (positions[: real[0]] == 0).all()
            assert (positions[real[-1] + 1 :] == len(real) - 1).all()
        starts = {int(np.nonzero(row)[0][0]) for row in batch["segments"]}
        assert starts <= {*range(token_batches.PADDING + 1)}
        packed = token_batches.packed(seed, 9, 14, 50)
        for tokens, labels, positions, segments in zip(*packed.values(), strict=True):
            assert sorted({*segments}) == [1, 2, 3]
            for i in range(14):
                first = int(np.nonzero(segments == segments[i])[0][0])
                assert positions[i] == i - first
                same = i < 13 and segments[i + 1] == segments[i]
                assert labels[i] == (tokens[i + 1] if same else token_batches.IGNORED)
    rows = np.concatenate([token_batches.padded(seed, 99, 14, 50)["segments"].argmax(1) for seed in range(2)])
    assert {*rows} == {*range(token_batches.PADDING + 1)}
    tokens = np.concatenate([token_batches.packed(seed, 99, 5, 3)["tokens"] for seed in range(2)])
    assert {*tokens.flat} == {0, 1, 2}


def test_both_losses_of_text_sum_over_the_labels_that_are_not_ignored() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    labels = np.array([[3, token_batches.IGNORED, 0], [1, 2, token_batches.IGNORED]])
    theirs, weight = token_batches.torch_loss(torch.from_numpy(logits), {"labels": torch.from_numpy(labels)})
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -(log_p[0, 0, 3] + log_p[0, 2, 0] + log_p[1, 0, 1] + log_p[1, 1, 2])
    ours = token_batches.loss(logits, labels)  # type: ignore[arg-type]
    assert (weight, int(ours.weight)) == (4, 4)
    np.testing.assert_allclose([theirs.item(), float(ours.total)], expected, rtol=1e-6)


def test_models_of_text_get_the_mask_and_the_positions_of_their_batch() -> None:
    called: list[dict[str, Any]] = []

    def model(tokens: Any, **given: Any) -> Any:
        called.append(given)
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, 5))

    batch = {name: torch.from_numpy(x) for name, x in token_batches.padded(0, 2, 8, 5).items()}
    for loss in (token_batches.torch_padded_loss, token_batches.torch_packed_loss):
        total, weight = loss(model, batch)  # type: ignore[arg-type]
        assert total.item() == pytest.approx(weight * math.log(5))
    padded, packed = called
    assert torch.equal(padded["attention_mask"], batch["segments"] == 1)
    assert all(torch.equal(x["position_ids"], batch["positions"]) for x in called)
    assert packed["use_cache"] is False


def test_the_truth_of_convolutions_is_pytorchs_result_with_both_gradients() -> None:
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape) for shape in ((2, 4, 5, 3), (5, 7, 3, 2), (2, 4, 5, 2)))
    image, kernel = (torch.from_numpy(a).requires_grad_() for a in (x, w))
    y = F.conv2d(image.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), padding=(2, 3)).permute(0, 2, 3, 1)
    y.backward(torch.from_numpy(dy))
    found = products_check.convolution_truth(x, w, dy)
    given: Any = (("result", y), ("gradient of x", image.grad), ("gradient of w", kernel.grad))
    for what, expected in given:
        np.testing.assert_allclose(found[what], expected.detach(), rtol=1e-12, atol=1e-12)


def test_products_and_convolutions_are_checked_against_bounds_of_their_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def in_each_precision(name: str, operation: Any, given: Any, truth: Any, terms: Any) -> Any:
        seen[name] = given, truth, terms
        return iter(())

    with monkeypatch.context() as patch:
        patch.setattr(products_check, "_in_each_precision", in_each_precision)
        assert [*products_check.products(), *products_check.convolutions()] == []
    (x, w, dy), truth, terms = seen["product"]
    x, w, dy = (a.astype(float) for a in (x, w, dy))
    expected = {"result": x @ w, "gradient of x": dy @ w.T, "gradient of w": x.T @ dy}
    for what, value in expected.items():
        np.testing.assert_allclose(truth[what], value)
    assert terms == {"result": 512, "gradient of x": 384, "gradient of w": 256}
    (x, w, dy), truth, terms = seen["convolution"]
    assert terms == {
        name: 64 * k for name, k in {"result": 9 * 32, "gradient of x": 9 * 64, "gradient of w": 4 * 14 * 14}.items()
    }
    image, kernel = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(w).permute(3, 2, 0, 1)
    ours = F.conv2d(image.double(), kernel.double(), padding=1)
    np.testing.assert_allclose(truth["result"], ours.permute(0, 2, 3, 1), atol=1e-10)

    def outcomes(errors: dict[str, float], dtype: str | None = None) -> list[CheckResult]:
        of = {"a": np.full(4, 2.0), "b": np.full(4, 8.0)}
        wrong = {what: x + np.array([errors[what] * np.linalg.norm(x), 0, 0, 0]) for what, x in of.items()}
        monkeypatch.setattr(
            products_check,
            "_computed",
            lambda operation, precision, given: (wrong, dtype or products_check.DTYPES[precision]),
        )
        return [*products_check._in_each_precision("p", None, (), of, {"a": 4, "b": 16})]  # type: ignore[arg-type]

    single = 2.0**-24
    # Rounding of both operands and of the result, and √k units of float32.
    bounds = {
        "fp32": (2 * single, 4 * single),
        "tf32": (math.sqrt(3) * 2**-10 + 2 * single, math.sqrt(3) * 2**-10 + 4 * single),
        "bf16": (math.sqrt(3) * 2**-8 + 2 * single, math.sqrt(3) * 2**-8 + 4 * single),
        "fp16": (math.sqrt(3) * 2**-11 + 2 * single, math.sqrt(3) * 2**-11 + 4 * single),
    }
    for i, (precision, (of_a, of_b)) in enumerate(bounds.items()):
        assert outcomes({"a": 0.99 * of_a, "b": 0.99 * of_b})[i].passed
        assert not outcomes({"a": 1.01 * of_a, "b": 0})[i].passed
        assert not outcomes({"a": 0, "b": 1.01 * of_b})[i].passed
        assert not outcomes({"a": math.inf, "b": 0})[i].passed
        assert outcomes({"a": 0.5 * of_a, "b": 0.9 * of_b})[i].name == f"p, {precision}"
        assert "b" in outcomes({"a": 0.5 * of_a, "b": 0.9 * of_b})[i].detail.split()
    assert not any(result.passed for result in outcomes({"a": 0, "b": 0}, "float64"))


def test_tiles_and_blocks_of_fp8_are_quantized_by_their_own_largest_magnitudes() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((140, 150)) * np.exp(rng.uniform(-5, 5, (140, 150))))

    def quantized(block: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(448.0 / max(block.abs().max().item(), 1e-12), dtype=torch.float64).float()
        return (block.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    tiles, squares = torch_fp8._tiles(x), torch_fp8._squares(x)
    for columns in (slice(0, 128), slice(128, 150)):
        assert torch.equal(tiles[:, columns], torch.stack([quantized(row) for row in x[:, columns]]))
        for rows in (slice(0, 128), slice(128, 140)):
            assert torch.equal(squares[rows, columns], quantized(x[rows, columns]))
    assert torch.equal(torch_fp8._tiles(torch.zeros(1, 3)), torch.zeros(1, 3))
    a, w = x[None, :, :32].clone().requires_grad_(), x.T[:32, :16].clone().requires_grad_()
    y = torch_fp8._Blocks.apply(a, w)
    assert y.shape == (1, 140, 16)
    torch.testing.assert_close(y[0].detach(), (torch_fp8._tiles(x[:, :32]) @ torch_fp8._squares(w.detach())).double())
    dy = torch.from_numpy(rng.standard_normal((1, 140, 16)))
    y.backward(dy)
    assert a.grad is not None
    assert w.grad is not None
    torch.testing.assert_close(a.grad[0], (torch_fp8._tiles(dy[0]) @ torch_fp8._squares(w.detach()).T).double())
    of_w = torch_fp8._tiles(x[:, :32].T) @ torch_fp8._tiles(dy[0].T).T
    torch.testing.assert_close(w.grad, of_w.double())


def test_bfloat16_parameters_are_rounded_by_chance_or_with_what_was_lost() -> None:
    before = torch.ones(4096, dtype=torch.bfloat16)
    ulp = 2.0**-7
    after, state = torch.full((4096,), 1 + ulp / 4), dict[str, Any]()
    rounded = param_rounding.stochastically(before, after, state).float()
    assert {*rounded.tolist()} == {1.0, 1 + ulp}
    assert (rounded > 1).float().mean().item() == pytest.approx(1 / 4, abs=0.03)
    assert not torch.equal(rounded, param_rounding.stochastically(before, after, state).float())
    exact = torch.full((9,), 1 + ulp)
    assert torch.equal(param_rounding.stochastically(before[:9], exact, {}).float(), exact)
    negative = param_rounding.stochastically(before, -after, {}).float()
    assert {*negative.tolist()} == {-1.0, -1 - ulp}
    p, lost, seen = torch.ones(1, dtype=torch.bfloat16), dict[str, Any](), []
    for _ in range(4):  # a quarter of a unit each, of which the rounding to nearest would lose all
        p = param_rounding.with_compensation(p, p.float() + ulp / 4, lost)
        seen.append((p.item(), lost["lost"].item()))
    assert seen == [(1, ulp / 4), (1, ulp / 2), (1 + ulp, -ulp / 4), (1 + ulp, 0)]


def test_an_optimizer_of_bfloat16_parameters_computes_in_float32() -> None:
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    z = torch.nn.Parameter(torch.ones(1, dtype=torch.complex64))
    optimizer = torch.optim.SGD([p, z], lr=2.0**-9, momentum=0.5)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rounding(before: torch.Tensor, after: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        seen.append((before, after.clone()))
        state["times"] = state.get("times", 0) + 1
        return (after + state["times"]).bfloat16()

    param_rounding.round_after_updates(optimizer, rounding)
    for gradient in (torch.tensor([1.0, 2.0]), None):
        p.grad = None if gradient is None else gradient.bfloat16()
        z.grad = torch.ones(1, dtype=torch.complex64)
        optimizer.step()
    assert [x.dtype for pair in seen for x in pair] == [torch.bfloat16, torch.float32] * 2
    assert torch.equal(seen[0][1], 1 - torch.tensor([1.0, 2.0]) / 512)
    assert (p.dtype, p.data.tolist()) == (torch.bfloat16, [4.0, 4.0])
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16
    assert (z.dtype, optimizer.state[z]["momentum_buffer"].dtype) == (torch.complex64,) * 2


def test_frozen_parameters_have_no_gradient_no_update_and_no_moments() -> None:
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0, 4.0])}

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return jaxtrain.Loss((params["a"] * params["b"] * batch).sum(), 1), {}

    is_a = lambda path: path == "a"  # noqa: E731
    grads = jax.grad(lambda p: frozen.without_frozen(loss_fn, is_a)(p, 2.0, None)[0].total)(params)
    assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, grads)) == {"a": [0, 0], "b": [2, 4]}
    assert frozen.without_frozen(loss_fn, none_frozen) is loss_fn
    own = AdamW(lr=0.5, weight_decay=0.5)
    assert frozen.frozen_too(own, none_frozen) is own
    kept, plain = frozen.frozen_too(own, is_a), AdamW(lr=0.5, weight_decay=0.5)
    grads = {"a": jnp.ones(2), "b": jnp.ones(2)}
    updates, state = kept.jax.update(grads, kept.jax.init(params), params)
    alone, _ = plain.jax.update({"b": grads["b"]}, plain.jax.init({"b": params["b"]}), {"b": params["b"]})
    assert not np.any(updates["a"])
    np.testing.assert_array_equal(updates["b"], alone["b"])
    moments = [x for path, x in jax.tree_util.tree_leaves_with_path(state) if "'a'" in str(path)]
    assert len(moments) >= 2
    assert not np.any(moments)
    assert (kept.name, kept.torch, kept.moments) == (
        own.name if hasattr(own, "name") else kept.name,
        own.torch,
        own.moments,
    )


def test_a_nan_of_the_batch_is_named() -> None:
    division = "look for a division, log or root of 0"
    assert cause_of_nonfinite({"i": np.array([1]), "x": np.array([0.0, np.inf])}) == division
    found = cause_of_nonfinite({"ok": np.ones(2), "x": np.array([1.0, np.nan]), "y": np.array([np.nan])})
    assert found == "x of the batch has NaN: leave such rows out"


def test_the_layouts_of_a_leaf_follow_from_shapes_and_owner() -> None:
    linear, conv = torch.nn.Linear, torch.nn.modules.conv._ConvNd
    assert whole_layouts((3,), (3,), None, set()) == [AS_IS]
    assert whole_layouts((3,), (4,), None, set()) == []
    assert whole_layouts((2, 3), (3, 2), None, set()) == [LINEAR]
    assert whole_layouts((2, 3), (3, 2), linear, set()) == [LINEAR]
    assert whole_layouts((3, 3), (3, 3), linear, set()) == [LINEAR, AS_IS]
    assert whole_layouts((3, 3), (3, 3), None, set()) == [AS_IS, LINEAR]
    assert whole_layouts((2, 3), (2, 3), linear, set()) == [AS_IS]
    assert whole_layouts((2, 3, 4, 5), (4, 5, 3, 2), conv, set()) == [CONV]
    assert whole_layouts((2, 3, 4, 5), (4, 5, 3, 2), None, set()) == [CONV]
    assert whole_layouts((2, 3, 4, 5), (2, 3, 4, 5), conv, set()) == [AS_IS]
    assert whole_layouts((3, 3, 3), (3, 3, 3), conv, set()) == [CONV]
    assert whole_layouts((3, 3, 3), (3, 3, 3), None, set()) == [AS_IS]
    flat = [x.source for x in whole_layouts((5, 24), (24, 5), linear, {2, 24, 7})]
    # Of 2 channels 12 pixels, the squarest first; of 24 channels one pixel, which has no order.
    assert flat[1:] == [
        f"linear_after_flatten({n}, {h}, {w})"
        for n, h, w in [(2, 3, 4), (2, 4, 3), (2, 2, 6), (2, 6, 2), (2, 1, 12), (2, 12, 1)]
    ]
    sources = [[x.source for x in found] for found in (
        head_layouts((12,), (3, 4)), head_layouts((12, 7), (7, 3, 4)), head_layouts((7, 12), (3, 4, 7)),
        head_layouts((12,), (3, 5)), head_layouts((12, 7), (8, 3, 4)), head_layouts((7, 12), (3, 4, 8)),
    )]  # fmt: skip
    expected = [bias_to_heads(3, 4), linear_to_heads(3, 4), linear_from_heads(3, 4)]
    assert sources == [*([x.source] for x in expected), [], [], []]


def test_a_proof_counts_every_tensor_of_a_stack() -> None:
    table = NameTable({"a": TorchParam("x"), "b": TorchParam("h.{layer}.y"), "c": TorchParam("z")})
    like = {"a": np.ones((5, 2)), "b": np.ones((3, 4)), "c": np.ones(())}
    assert _used(table, like) == ["x", "h.0.y", "h.1.y", "h.2.y", "z"]


def stage(name: str, distance: float) -> Stage:
    return Stage(name, distance, "w", 1)


def test_the_stage_at_fault_is_the_first_or_one_that_differs_a_million_times_more() -> None:
    held = stage("loss", 1e-10)
    assert stages.at_fault([held, stage("update", 1e-10)]) is None
    near, far = stage("gradients", 2e-10), stage("update", 1.9e-4)
    assert stages.at_fault([held, near, far]) is near
    beyond = stage("update", 2.1e-4)
    assert stages.at_fault([held, near, beyond, stage("buffers", 1e-3)]).name == "buffers"  # type: ignore[union-attr]
    assert stages.at_fault([held, near, beyond]) is beyond
    assert stages.blame([held]) is None
    assert (
        stages.blame([stage("loss", 1.0), near])
        == "loss: 1e+00 apart (w, step 1); look at the forward pass and the loss"
    )
    exact, rough = stage("loss", 1e-13), stage("loss", 1.1e-13)
    assert stages.blame([exact, near]).endswith(stages.LOOK_AT["gradients"])  # type: ignore[union-attr]
    assert "does not show it" in stages.blame([exact, near], "forward")  # type: ignore[operator]
    assert "more than rounding" in stages.blame([rough, near], "forward")  # type: ignore[operator]
    assert stages.blame([held, stage("loss", 1.0), near], "forward").endswith("pass and the loss")  # type: ignore[union-attr]
    assert stages.blame([stage("loss", 1.0), stage("gradients", 1e9)]).endswith(stages.LOOK_AT["gradients"])  # type: ignore[union-attr]


def test_a_stage_has_the_first_step_over_the_bar_or_else_the_worst() -> None:
    def of(*distances: float) -> Stage:
        theirs = {"a": np.array([1.0]), "b": np.array([1.0])}
        seen = [
            Comparison(i, "loss", {"a": np.array([1.0]), "b": np.array([1 + d])}, theirs)
            for i, d in enumerate(distances, 1)
        ]
        (found,) = stages._worst(seen)
        return found

    for distances, step in (((1e-12, 3e-12, 2e-12), 2), ((1e-12, 1e-3, 1e-1), 2), ((1e-3, 1.0, 1e-12), 1)):
        found = of(*distances)
        assert (found.step, found.worst) == (step, "b")
        assert found.distance == pytest.approx(distances[step - 1], rel=1e-3)
    order = stages._worst(Comparison(1, name, {"a": np.ones(1)}, {"a": np.ones(1)}) for name in ("update", "loss"))
    assert [x.name for x in order] == ["update", "loss"]


def record(losses: Any = (1.0, 2.0, 3.0), norms: Any = (1.0, 1.0, 1.0), **grads: float) -> Record:
    values = {name: np.array([x]) for name, x in {"a.weight": 1.0, "a.bias": 1.0, "b.weight": 1.0, **grads}.items()}
    return Record(
        np.array(losses), values, Snapshot(values, {}, {}), Snapshot(values, {}, {}), np.ones(4), np.array(norms)
    )


def test_a_quantization_that_differs_is_placed_by_step_stage_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = record()
    first = quantized._first_step
    assert first(record(), theirs) == 1
    assert first(record(losses=(1.0, 2.0, 3.1)), theirs) == 3
    assert first(record(norms=(1.0, 1.1, math.nan)), theirs) == 2
    assert first(record(losses=(1.0, math.nan, 3.1)), theirs) == 2
    assert first(record(losses=(1.0, 2.0, 3.1), **{"a.bias": 1.1}), theirs) == 1
    assert first(record(losses=(1.0, 2.0 + 1e-11, 3.1)), theirs) == 3
    # Distances are relative to losses and norms of any size and sign.
    sized = record(losses=(1e3, -1e3, 1e-3), norms=(1.0, 1e4, 1e-4))
    for step, errors in ((1, (9e-11, 9e-11, 9e-11)), (2, (0, 1.1e-10, 0)), (3, (0, -9e-11, 1.1e-10))):
        factor = 1 + np.array(errors)
        assert first(replace(sized, losses=sized.losses * factor), sized) == step
        assert first(replace(sized, grad_norms=sized.grad_norms * factor), sized) == step

    def placed(**of: Any) -> tuple[str, int, str]:
        examined = SimpleNamespace(ours=record(**of), theirs=theirs)
        settings = SimpleNamespace(accumulate=1, seed=0)
        found: Divergence = quantized._first(None, "fp8", examined, settings)  # type: ignore[arg-type]
        return found.stage, found.step, found.torch

    after = "what fp8 keeps after step 1: amax history or quantized parameters"
    assert placed(losses=(1.0, 2.1, 3.0)) == ("state", 2, after)
    assert placed() == ("update", 1, "parameters")
    assert placed(**{"a.weight": 2.0}) == ("backward", 1, "gradient of a.weight alone: its product with the input")
    both = {"a.weight": 2.0, "a.bias": 2.0}
    assert placed(**both) == ("backward", 1, "gradients from a.bias on: the input of the product after it")
    every = {**both, "b.weight": 2.0}
    assert placed(**every)[2] == "gradients from b.weight on: the input of the product after it"
    monkeypatch.setattr(quantized, "activations", lambda *args, **kwargs: "values")
    monkeypatch.setattr(quantized, "first_requantized", lambda values: None)
    assert placed(losses=(1.1, 2.0, 3.0)) == ("forward", 1, "loss")


def test_outputs_are_compared_by_names_kinds_numbers_and_distances() -> None:
    x, y = np.array([3.0, 4.0]), np.array([1, 2, 3])
    near = x + np.array([0.0, 5e-3])

    def faults(ours: Any, theirs: Any, bar: float = 1e-3) -> list[str]:
        return [*outputs._apart(" kind", [{"ok": x}, ours], [{"ok": x}, theirs], bar)]

    assert faults({"": near}, {"": x}, 1.01e-3) == []
    assert faults({"": near}, {"": x}, 0.99e-3) == ["evaluation kind: the output is 1.0e-03 apart, over 1e-03"]
    assert faults({"a": x, "b": y}, {"a": x}) == ["evaluation kind: only one side returns b"]
    assert faults({"a": x[:1]}, {"a": x}) == ["evaluation kind: output 'a' is float64 [1], in PyTorch float64 [2]"]
    assert faults({"a": y}, {"a": y * 1.0}) == ["evaluation kind: output 'a' is integers [3], in PyTorch float64 [3]"]
    assert faults({"a": y, "b": x}, {"a": y + np.array([0, 1, 1]), "b": -x}) == [
        "evaluation kind: output 'a' has 2 of 3 other numbers than PyTorch's",
        "evaluation kind: output 'b' is 2.0e+00 apart, over 1e-03",
    ]
    gradients = lambda ours, theirs: [*outputs._gradients_apart("", [ours], [theirs], 1e-3)]  # noqa: E731
    assert gradients({}, {}) == []
    assert gradients({"a": x, "b": near}, {"a": x, "b": x}) == []  # on the scale of both gradients
    wrong = {"a": 2 * x, "b": 4 * x}
    assert gradients(wrong, {"a": x, "b": x}) == ["evaluation: the gradient of b is 3.0e+00 apart, over 1e-03"]
    inf = np.array([np.inf, 3.0, np.nan])
    assert outputs._distance(inf, inf) == 0
    assert outputs._distance(inf * [1, 2, 1], inf) == 1
    assert outputs._distance(-inf, inf) == np.inf
    assert outputs._distance(np.array([1.0, 3.0, np.nan]), inf) == np.inf
    assert outputs._distance(np.array([0.0, 2.0]), np.zeros(2)) == 2
    assert outputs._far(np.array([1, 2, 5, 5]), np.array([1, 2, 3, 4])) == 0.5
    assert outputs._far(np.array([], int), np.array([], int)) == 0
    assert outputs._far(np.array([9.0, 6.0, 1.0]), inf) == 1
    assert outputs._far(x, x[:1]) == np.inf
    assert outputs._nudged(y, np.random.default_rng(0)) is y
    assert outputs._nudged(x, None) is x
    single = np.ones(999, np.float32)
    nudged = outputs._nudged(single, np.random.default_rng(0))
    assert nudged.dtype == np.float32
    assert {*nudged.tolist()} == {1 - 2.0**-23, 1 + 2.0**-23}


def test_outputs_in_the_modules_own_dtypes_may_be_as_far_off_as_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's plain run, those from weights one ulp off, and the float64 run.
    runs = {None: ([1.001], [1, 2, 3, 5]), 0: ([1.0011], [1, 2, 3, 5]), 1: ([1.001], [1, 2, 3, 5])}
    of = lambda y, n: [{"y": np.array(y), "n": np.array(n)}]  # noqa: E731

    def in_torch(case: Any, weights: Any, batches: Any, precision: str, nudge: int | None) -> Any:
        return SimpleNamespace(outputs=of(*runs[nudge]))

    def faults(y: float, n: list[int]) -> list[str]:
        monkeypatch.setattr(outputs, "_in_jax", lambda *args: of([y], n))
        case: Any = SimpleNamespace(outputs=SimpleNamespace(in_jax=None))
        found = outputs._in_own_numbers(case, {}, [{}], of([1.0], [1, 2, 3, 4]))
        return [line.partition(": ")[2].partition(" apart")[0] for line in found]

    monkeypatch.setattr(outputs, "_in_torch", in_torch)
    monkeypatch.setattr(outputs, "jit_as_written", lambda fn: fn)
    assert faults(1.1, [1, 2, 3, 5]) == []
    assert faults(1.12, [1, 2, 3, 4]) == ["output 'y' is 1.2e-01", "output 'n' is 2.5e-01"]


def test_random_batches_follow_the_values_of_an_example() -> None:
    floats = np.random.default_rng(0).normal(5, 0.5, (4, 3)) - 5.0
    example = Example(
        {
            "mask": np.array([[1, 0], [1, 1], [0, 0], [1, 0]]),
            "flags": np.array([True, False, True, True]),
            "labels": (np.array([3, -100, 5, 4], np.int32), 2, None, "text"),
            "normal": floats,
            "positive": np.array([2.0, 4.0, 3.0, 2.5], np.float32),
            "rectified": torch.tensor([0.0, 3.0, 0.0, 1.0], dtype=torch.float64),
            "short": torch.tensor([3, 2, 5, 2], dtype=torch.int16),
            "constant": torch.ones(4, 2, dtype=torch.bfloat16),
            "empty": np.zeros((4, 0)),
        }
    )
    floats_of = ("normal", "positive", "rectified", "constant", "empty")
    assert example.names == {"mask", "flags", "labels/0", "short", *floats_of}
    assert example.rows == 4
    batch = example.batch(0, 8)
    assert {name: x.dtype for name, x in batch.items()} == {
        **dict.fromkeys(floats_of, np.dtype("float32")),
        **{"mask": np.dtype("int64"), "labels/0": np.dtype("int64"), "flags": np.dtype("bool")},
        **{"short": np.dtype("int16")},
    }
    assert sorted(map(tuple, batch["mask"].tolist())) == sorted(2 * [(1, 0), (1, 1), (0, 0), (1, 0)])
    assert batch["flags"].sum() == 6
    assert (batch["labels/0"][[1, 5]] == -100).all()
    many = example.batch(1, 4000)
    assert {*many["labels/0"].tolist()} == {-100, 0, 1, 2, 3, 4, 5}
    assert {*many["short"].tolist()} == {2, 3, 4, 5}
    assert 0 <= many["rectified"].min() < 0.01 < 2.99 < many["rectified"].max() <= 3
    assert many["normal"].mean() == pytest.approx(floats.mean(), abs=0.05)
    assert many["normal"].std() == pytest.approx(floats.std(), rel=0.05)
    assert 2 <= many["positive"].min() < 2.01 < 3.99 < many["positive"].max() <= 4
    assert many["constant"].std() == pytest.approx(1, abs=0.05)
    assert abs(many["constant"].mean()) < 0.05
    kept = example.batch(1, 6, same_integers=True)
    assert kept["labels/0"].tolist() == [3, -100, 5, 4, 3, -100]
    assert kept["mask"].tolist() == [[1, 0], [1, 1], [0, 0], [1, 0], [1, 0], [1, 1]]
    assert (example.batch(1, 6)["normal"] == example.batch(1, 6)["normal"]).all()
    alone = Example((np.ones((2, 3)), np.ones(4)))
    assert alone.rows is None
    assert {name: x.shape for name, x in alone.batch(0, 1).items()} == {"0": (1, 2, 3), "1": (1, 4)}
    assert Example(np.ones((5, 2))).names == {"input"}
    assert Example(np.float32(1.0)).rows is None


def test_a_batch_whose_integers_the_model_assumes_away_keeps_those_of_the_example() -> None:
    example = Example({"x": np.array([0.0, 1.0, 2.0], np.float32), "n": np.array([3, 7, 5])})
    drawn, kept = (example.batch(5, 4, same_integers=same) for same in (False, True))
    assert drawn["n"].tolist() != kept["n"].tolist() == [3, 7, 5, 3]
    asked: list[Any] = []
    for failed, expected in ((None, drawn), ("n is not 3, 7, 5", kept)):

        def failed_assumption(given: Any, failed: str | None = failed) -> str | None:
            asked.append(given)
            return failed

        model: Any = SimpleNamespace(failed_assumption=failed_assumption)
        found = imported._fulfilling(model, example, 5, 4)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [(given["n"].tolist(), given["n"].dtype) for given in asked] == [(drawn["n"].tolist(), np.int32)] * 2


def test_batches_have_the_structure_and_the_dtypes_of_the_example() -> None:
    @dataclasses.dataclass
    class Pair:
        x: Any
        y: Any

    tensors = {
        "low": torch.ones(2, 1, dtype=torch.float16),
        "double": torch.ones(2, dtype=torch.float64),
        "ids": torch.ones(2, dtype=torch.int32),
        "pair": Pair([np.ones(2), 7], (torch.ones(2, dtype=torch.bool),)),
    }
    example = Example(tensors)
    given = {
        "low": torch.zeros(3, 1, dtype=torch.float64),
        "double": torch.zeros(3, dtype=torch.float32),
        "ids": torch.zeros(3, dtype=torch.int64),
        "pair/x/0": torch.full((3,), 2.0),
        "pair/y/0": torch.zeros(3, dtype=torch.int64),
    }
    found = example.in_torch(given)
    assert [*found] == [*tensors]
    assert type(found["pair"].y) is tuple
    assert found["pair"].x[1] == 7
    assert found["pair"].x[0].tolist() == [2, 2, 2]
    dtypes = [found["low"], found["double"], found["ids"], found["pair"].y[0]]
    assert [x.dtype for x in dtypes] == [torch.float64, torch.float64, torch.int32, torch.bool]
    half = example.in_torch({**given, "double": torch.zeros(3, dtype=torch.bfloat16)})
    assert half["double"].dtype == torch.bfloat16
    ours = example.in_jax({name: x.numpy() for name, x in given.items()})
    assert (ours["ids"].dtype, ours["pair"].y[0].dtype, ours["low"].dtype) == (np.int32, bool, np.float64)
    single = Example({"x": np.ones((2, 3)), "y": np.ones(4)})
    assert single.in_jax({"x": np.zeros((1, 2, 3)), "y": np.zeros((1, 4))})["x"].shape == (2, 3)


def test_a_bundle_restores_every_array_of_a_run(tmp_path: Path) -> None:
    def tensors(first: int) -> dict[str, np.ndarray]:
        return {"a.weight": np.arange(first, first + 6.0).reshape(2, 3).T, "b/c": np.array(float(first))}

    def state(first: int) -> Snapshot:
        return Snapshot(
            tensors(first), {"exp_avg": tensors(first + 1), "exp_avg_sq": tensors(first + 2)}, tensors(first + 3)
        )

    def run(first: int) -> Record:
        numbers = np.arange(3.0) + first
        return Record(numbers, tensors(first), state(first), state(first + 10), numbers + 1, numbers + 2)

    whole = Reference(tensors(7), run(0), [run(20), run(40)], [run(60)], run(80))
    bundle._write(tmp_path, "fp32-3", whole)
    bundle._write(tmp_path, "fp32-30", replace(whole, reordered=[]))
    found = bundle._read(tmp_path, "fp32-3")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), asdict(found), asdict(whole))
    assert [len(found.reordered), len(found.one_ulp)] == [2, 1]
    assert bundle._read(tmp_path, "fp32-30").reordered == []
    settings = Settings(accumulate=2, remat="full", steps=3, seed=5)
    assert [*bundle._seeds("fp64", settings)] == [5]
    assert [*bundle._seeds("bf16", settings)] == [*range(5, 5 + TRAININGS)]
    opened = bundle.Bundle(tmp_path, "case", ("fp32",), replace(settings, seed=3))
    assert np.array_equal(opened.reference("fp32", replace(settings, seed=3, remat="none")).theirs.losses, [0, 1, 2])
    others: list[tuple[str, dict[str, Any]]] = [("fp64", {}), ("fp32", {"accumulate": 1}), ("fp32", {"seed": 2})]
    for precision, given in [*others, ("fp32", {"steps": 4})]:
        with pytest.raises(UserError, match=r"recorded with|contains fp32 with seed 3"):
            opened.reference(precision, replace(settings, **{"seed": 3, **given}))


def step_with(**grads: list[float]) -> Any:
    return SimpleNamespace(grads={name: np.array(x) for name, x in grads.items()})


def test_coverage_names_unclipped_steps_and_elements_without_a_gradient() -> None:
    bounded: Any = lambda bound: SimpleNamespace(clip_norm=bound)  # noqa: E731
    seen = coverage.Coverage()
    seen(step_with(w=[3.0, 0.0, 0.0], b=[4.0]))
    assert seen._steps() == ["one step exercises no momentum, no decay of moments and no schedule"]
    seen(step_with(w=[0.0, 1.0, 0.0], b=[0.0]))
    assert seen._steps() == []
    assert seen.norms == [5.0, 1.0]
    assert {name: x.tolist() for name, x in seen.reached.items()} == {"w": [True, True, False], "b": [True]}
    assert seen._clipping(bounded(None)) == []
    assert seen._clipping(bounded(1.0)) == []
    assert seen._clipping(bounded(5.0)) == ["no step was clipped: gradient norms 1 to 5, clip_norm 5"]
    assert seen._clipping(bounded(0.5)) == ["every step was clipped: gradient norms 1 to 5, clip_norm 0.5"]
    case = CASES["mlp"]()
    tried = seen.clipping_sometimes(replace(case, clip_norm=9.0))
    assert tried is not None
    assert tried.clip_norm == 3.0
    assert seen.clipping_sometimes(replace(case, clip_norm=2.0)) is None
    assert seen.clipping_sometimes(replace(case, clip_norm=None)) is None
    many = coverage.Coverage()
    many.reached = {f"p{i}": np.arange(9) < i for i in range(8)} | {"whole": np.ones(9, bool)}
    lines = many._parameters(replace(case))
    assert lines[0] == "p0: 9 of 9 elements never had a gradient"
    assert lines[4:] == ["p4: 5 of 9 elements never had a gradient", "3 more parameters had a gradient only in part"]
    many.reached = {f"p{i}": np.arange(9) < i + 4 for i in range(5)}
    assert len(many._parameters(case)) == 5
    rows = np.array([[True, True], [False, False], [True, True]])
    assert coverage._unreached(rows) == "1 of 3 rows"
    assert coverage._unreached(rows & [True, False]) == "4 of 6 elements"
    assert coverage.kinks({"abs": 1, "amax": 2}) == "kink: input of abs at 0, once; tie: in amax, 2 times"


def activation(ours: float, theirs: float, name: str = "fc") -> activations.Activation:
    return activations.Activation(name, np.ones(1), np.ones(1), theirs, ours, None)


def test_the_first_module_that_is_less_precise_or_rounded_otherwise_is_named() -> None:
    good, bad = activation(2e-3, 1e-3, "first"), activation(2.1e-3, 1e-3, "second")
    worse = activation(9.0, 1e-3, "third")
    assert activations.first_imprecise([good, good]) is None
    found = activations.first_imprecise([good, bad, worse])
    assert found is not None
    assert (found.torch, found.last_match) == ("second: output 2.1 times as far from float64 as PyTorch's", "first")
    first = activations.first_imprecise([worse])
    assert first is not None
    assert first.last_match == "its inputs"
    assert activation(0.0, 0.0).error_ratio == 1
    assert activation(1e-9, 0.0).error_ratio == np.inf
    alike = activation(1e-3 + 0.9e-10, 1e-3), activation(1e-3 - 0.9e-10, 1e-3)
    assert activations.first_requantized(alike) is None
    assert activations.first_requantized([activation(1e-3 + 1.1e-10, 1e-3)]) is not None
    assert activations.first_requantized([activation(1e-3 - 1.1e-10, 1e-3)]) is not None
    assert activations.first_requantized([activation(math.nan, 1e-3)]) is not None
    assert activations._error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)
    values = {"a": np.array([1.0, 2.0]), "zero": np.zeros(2), "b": np.array([3.0, 5.0])}
    given = [np.array([5.0, 3.0]), np.array([1.0, 2.0]), np.array([[1.0], [2.0]]), np.array([7.0])]
    assert activations._matched(values, given) == {"a": frozenset({1, 2}), "b": frozenset({0})}


def test_setting_by_setting_a_difference_is_attributed() -> None:
    asked: list[Settings] = []
    settings = Settings(accumulate=4, remat="full")

    def holds(without: str) -> Any:
        def check(plain: Settings) -> bool:
            asked.append(plain)
            return getattr(plain, without, None) == getattr(Settings(), without, 0)

        return check

    remat = "agrees with remat none: the difference arises only with remat full"
    accumulate = "agrees with accumulate 1: the difference arises only with accumulate 4"
    assert arises(settings, holds("remat")) == remat
    assert arises(settings, holds("accumulate")) == accumulate
    assert arises(settings, holds("neither")) is None
    assert asked[-2:] == [replace(settings, remat="none"), replace(settings, accumulate=1)]
    assert arises(Settings(accumulate=1, remat="none"), lambda plain: True) is None
    assert float64._listed(["a"]) == "a is"
    assert float64._listed(["a", "b", "c"]) == "a, b, c are"
    assert float64._listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more are"


def outcome(name: str, caught: bool, clean: bool, runs: int, loss: float = 1.0) -> Outcome:
    return Outcome(name, "case", caught, None, clean, runs, loss, 0.5)


def test_the_document_of_mutants_counts_the_caught_and_the_alarms_of_clean_runs() -> None:
    found = [
        outcome("a", True, True, 1),
        outcome("b", False, False, 1, math.inf),
        outcome("c", True, False, 0, math.nan),
    ]
    passed, alarm = SimpleNamespace(passed=True), SimpleNamespace(passed=False)
    counts = document(found, [passed, alarm, alarm])  # type: ignore[list-item]
    rows = counts.pop("mutants")
    assert counts == {"caught": 2, "total": 3, "clean_runs": 5, "false_alarms": 3}
    largest = float(np.finfo(np.float64).max)
    assert [row["loss_rel"] for row in rows] == [1.0, largest, largest]
    assert rows[0] == {
        **{"name": "a", "case": "case", "caught": True, "located": None},
        **{"loss_rel": 1.0, "grad_rel_max": 0.5},
    }


def test_clean_runs_take_every_mutants_case_in_turn_every_tenth_in_low_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, dict[str, Any]]] = []
    made: list[str] = []

    def check(case: Any, **settings: Any) -> int:
        seen.append((case, settings))
        return len(seen)

    def case(name: str) -> Any:
        def make() -> str:
            made.append(name)
            return name

        return make

    monkeypatch.setattr(planting, "check", check)

    first, own = case("first"), case("own")
    listed = {
        "a": Mutant("a", first, first),
        "b": Mutant("b", own, own, settings={"precision": "fp16", "steps": 9}),
        "c": Mutant("c", first, first),
        "d": Mutant("d", own, own, around=lambda: nullcontext()),
    }
    assert planting.clean_runs([*listed.values()], 22, seed=100) == [*range(1, 23)]
    assert [case for case, _ in seen[:5]] == ["first", "own", "first", "own", "first"]
    assert made.count("first") == 1
    assert made.count("own") == 1 + 5
    assert [settings["seed"] for _, settings in seen] == [*range(100, 122)]
    assert seen[0][1] == {"steps": 2, "seed": 100}
    assert seen[1][1] == {"precision": "fp16", "steps": 9, "seed": 101}
    assert seen[9][1] == {"precision": "fp16", "steps": 9, "seed": 109}
    assert seen[19][1] == {"precision": "bf16", "steps": 8, "seed": 119}
    assert seen[18][1] == {"steps": 2, "seed": 118}
    clean = planting._CleanVerdicts()
    for name in "abcda":
        clean.of(listed[name], {"steps": 1})
    assert clean.runs == 3
    clean.of(listed["a"], {"steps": 2})
    assert clean.runs == 4


def test_the_values_of_a_trace_have_the_sources_and_the_evidence_that_they_are() -> None:
    trace: Trace[str] = Trace()
    x = trace.add_input(np.array([1.0, 2.0, 4.0]))
    batch = trace.add_batch(np.array([[1, 5, 3], [2, 2, 2]]))
    assert trace.length == 3
    constant = trace.add(np.array([0.25, 0.5]), frozenset(), "table")
    y = trace.add(np.array([2.0, 3.0, 7.0]), x | batch | constant, "y")
    value = trace.values[min(y)]
    assert (value.trained, value.where, value.sources) == (True, "y", x | batch | constant)
    assert trace.values[min(constant)].trained is False
    assert trace.add(np.array([1, 2, 5]), y, "indices") == y
    assert trace.add(np.zeros(3), y, "zeros") == y
    assert trace.lost == {min(y): ["zeros"]}
    assert trace.add(np.array([np.inf]), y, "inf") == y
    assert trace.add(np.array([1e-14, -1e-14]), y, "cancelled") == NOISE
    assert trace.add(np.array([1.0, 9.0]), frozenset({-1}), "random") == NOISE
    top = trace.add(np.array([7.0]), y, "reduce_max")
    assert trace.values[min(top)].extremum
    flipped = trace.add(np.array([7.0, 3.0, 2.0]), y, "flip")
    assert trace.values[min(flipped)].reordered == min(y)
    assert trace.computed(flipped) == y
    z = trace.add(np.array([9.0, 4.0]), flipped, "z")
    assert trace.values[min(z)].sources == y
    assert trace.in_order().values[min(z)].sources == flipped
    right = {min(x)}
    assert differing(trace, right, z) == y | z
    assert differing(trace, y, z) == {*z}
    assert constants_behind(trace, (), min(y)) == {*constant}
    assert constants_behind(trace, constant, min(y)) == set()
    assert ancestors(trace, z) == z | y | x | batch | constant
    assert sorted(edge(trace, y | z)) == sorted(y)
    forward = range(len(trace.values))
    assert correct(trace, z, forward) == ancestors(trace, z)
    assert correct(trace, z, ()) == {*z}
    assert correct(trace, top, forward) == {*top}


def test_values_near_to_another_are_found_nearest_first_and_constants_apart() -> None:
    ours: Trace[str] = Trace()
    for scale in (1.0, 1 + 1e-3, 1 + 1e-6, 2.0):
        ours.add_input(scale * np.array([1.0, 3.0]))
    ours.add_batch(np.array([[1.0, 3.0]]))
    theirs: Trace[str] = Trace()
    theirs.add_input(np.array([1.0, 3.0]))
    value = theirs.values[0]
    assert approximations(value, ours, 1e-2) == [0, 2, 1]
    assert approximations(value, ours, 1e-4) == [0, 2]
    assert nearest(value, ours) == 0
    assert nearest(replace(value, trained=False), ours) == 0
    assert nearest(value, Trace()) == np.inf
    assert apart(fingerprint(np.ones(2)), fingerprint(np.full(2, 1 + 1e-9)))
    assert not apart(fingerprint(np.ones(2)), fingerprint(np.full(2, 1 + 1e-11)))
    one = Fingerprint(4.0, 1.0, 0.5, 0.0)  # of the root mean square 2
    assert not apart(one, one._replace(mean=1.9e-10))
    assert apart(one, one._replace(mean=2.1e-10))
    assert apart(one, one._replace(magnitudes=1 + 1.1e-10))
    masks = [np.array(x) for x in ([0, 1, 1, 1], [True, False, False, False], [0.0, 0, 0, -np.inf], [-1e38, 0, 0, 0])]
    found = {mask_fingerprint(x) for x in masks}
    assert found == {(0.25, 0.25, 1.0, 0.25)}
    assert [mask_fingerprint(np.array(x)) for x in ([0, 2, 0], [1, 1], [0, 0], [0.0, 1.0, -np.inf])] == [None] * 4


def test_rows_and_optimizers_of_other_types_are_refused() -> None:
    case = CASES["mlp"]()
    others: tuple[Any, ...] = (0, -1, 1.5, "2", None)
    for rows in others:
        with pytest.raises(UserError, match="rows must be an integer of at least 1"):
            dataclasses.replace(case, rows=rows)
    assert dataclasses.replace(case, rows=1).rows == 1
    with pytest.raises(UserError, match="optimizer is a str"):
        dataclasses.replace(case, optimizer="adamw")  # type: ignore[arg-type]
    given = [x["image"] for x in case.batches(3, 4)]
    assert len(given) == 4
    assert len({x.tobytes() for x in given}) == 4
    np.testing.assert_array_equal(given[2], [*case.batches(3, 3)][2]["image"])
    assert not np.array_equal(given[0], next(case.batches(4, 1))["image"])


def selected(module: Any, *args: Any) -> list[str]:
    selections = Selections()
    watched = jax_selections._Watched(lambda *args, **options: "result", "of f", module, selections)
    assert watched(*args) == "result"
    return [line.partition(" throughout")[0] for line in selections.lines()]


def test_conditions_of_selections_in_jax_are_their_values_or_comparisons() -> None:
    x = np.array([1.0, 2.0, 3.0])
    assert selected(jax_selections._where, x > 5, 1, 2) == ["condition of f is False"]
    assert selected(jax_selections._where, x > 5) == []
    assert selected(jax_selections._where, x > 2, 1, 2) == []
    assert selected(jax_selections._where, x[:0] > 2, 1, 2) == []
    assert selected(jax_selections._clip, x, 0.0, 3.0) == ["x < min of f is False", "x > max of f is False"]
    assert selected(jax_selections._clip, x, 2.0, 2.5) == []
    assert selected(jax_selections._clip, x, None, 0.5) == ["x > max of f is True"]
    assert selected(jax_selections._clip, x, 4.0) == ["x < min of f is True"]
    assert selected(jax_selections._minimum, x, 3.0) == []
    assert selected(jax_selections._minimum, x, 1.0) == ["x < y of f is False"]
    assert selected(jax_selections._maximum, x, 3.0) == ["x > y of f is False"]
    assert selected(jax_selections._maximum, x, 0.5) == ["x > y of f is True"]
    ufunc: Any = jax_selections._Watched(np.maximum, "", jax_selections._maximum, Selections())
    assert ufunc.reduce([1, 3, 2]) == 3
    xs = {"a": np.ones((5, 2)), "b": np.ones((5,))}
    assert jax_selections._scan_length(None, None, xs) == 5
    assert jax_selections._scan_length(None, None, xs, 3) == jax_selections._scan_length(None, None, length=3) == 3
    assert jax_selections._map_length(None, xs) == 5
    assert jax_selections._fori_length(2, 7, None) == 5
    assert jax.eval_shape(
        lambda n: jnp.zeros(jax_selections._fori_length(0, n)), jax.ShapeDtypeStruct((), np.int32)
    ).shape == (65,)


def test_conditions_of_selections_in_pytorch_are_their_values_or_comparisons() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    of = torch_selections.SELECTIONS

    def found(name: str, *args: Any, **options: Any) -> dict[str, list[bool]]:
        return {what: condition.tolist() for what, condition in of[name](*args, **options)}

    assert found("where", x > 2, x, x) == {"condition of where": [False, False, True]}
    assert found("where", x > 2) == {}
    assert found("masked_fill", x, x > 1, 0) == {"mask of masked_fill": [False, True, True]}
    assert found("clamp", x, 2, 2) == {
        "x < min of clamp": [True, False, False],
        "x > max of clamp": [False, False, True],
    }
    assert found("clip", x, max=3) == {"x > max of clamp": [False] * 3}
    assert found("minimum", x, x.flip(0)) == {"x < y of minimum": [True, False, False]}
    assert found("maximum", x, x.flip(0)) == {"x > y of maximum": [False, False, True]}
    assert found("min", x) == found("max", x, 0) == {}


class Counting(torch.nn.Module):
    """Adds the number of its calls, in evaluation too."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return {"y": x * self.w + self.calls, "n": torch.tensor(3)}


def test_outputs_of_each_batch_start_from_the_same_state() -> None:
    batch = lambda seed, rows: {"x": np.full((rows, 1), seed, np.float32)}  # noqa: E731
    case = Case(
        *("counting", Counting, None, None, {"w": jax.ShapeDtypeStruct((1,), np.float32)}),  # type: ignore[arg-type]
        *(NameTable({"w": TorchParam("w")}), batch, 2, AdamW(lr=1.0), None),
        state_like={"calls": jax.ShapeDtypeStruct((), np.float32)},
        buffers=NameTable({"calls": TorchParam("calls")}),
        outputs=Outputs(lambda model, batch: model(batch["x"]), None, batch, 2, False),  # type: ignore[arg-type]
    )
    weights = {"w": np.array([3.0], np.float32), "calls": np.array(4.0, np.float32)}
    found = outputs._in_torch(case, weights, [batch(1, 2), batch(2, 2)], "fp64")
    assert found is not None
    assert [x["y"].tolist() for x in found.outputs] == [[[8.0], [8.0]], [[11.0], [11.0]]]
    assert [x["y"].dtype for x in found.outputs] == [np.float64] * 2
    of_sum = outputs._weights("y", (2, 1)).sum()
    assert [x["w"].tolist() for x in found.gradients] == [[of_sum], [2 * of_sum]]
    low = outputs._in_torch(case, weights, [batch(1, 2)], "fp32")
    assert low is not None
    assert (low.gradients, low.outputs[0]["y"].dtype, low.draws) == ([{}], np.float32, 0)
    kinds = dict(outputs._batches(case.outputs))  # type: ignore[arg-type]
    assert [len(x) for x in kinds.values()] == [outputs.BATCHES, 1]
    assert [len(x[0]["x"]) for x in kinds.values()] == [2, 1]
    assert [x["x"][0, 0] for x in kinds[""]] == [*range(outputs.BATCHES)]


def test_a_value_in_another_order_is_located_before_values_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [None]

    def first(step: int, *ends: str) -> Any:
        found.append((step, ends))
        return found[0]

    matching = SimpleNamespace(in_order=lambda: SimpleNamespace(first=first))
    programs = _Programs(None, None, [("their 1", "our 1"), ("their 2", "our 2")])  # type: ignore[arg-type,list-item]

    def located(stage: str) -> Any:
        at = SimpleNamespace(at=SimpleNamespace(stage=stage), matching=matching, step=2)
        monkeypatch.setattr(_Programs, "_first_value", lambda self: at)
        return at.at, programs.first()

    value, at = located("forward")
    assert at is value
    assert found[1:] == [(2, ("their 2", "our 2"))]
    found[0] = "reordered"
    assert located("forward")[1] == "reordered"
    value, at = located("backward")
    assert at is value
    monkeypatch.setattr(_Programs, "_first_value", lambda self: None)
    assert programs.first() is None


class Built(torch.nn.Module):
    """Tensors that are computed when the module is built."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.random = torch.tensor(1.0) / 3, torch.rand(2)
        self.trained = (torch.ones(2) / 3).requires_grad_()
        self.register_buffer("exact", torch.tensor(0.5))
        self.register_buffer("kept", torch.tensor(1.0) / 3)
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("empty", torch.ones(0))


def test_constants_are_computed_again_in_float64_unless_they_are_trained_random_or_exact() -> None:
    model = torch.nn.Sequential(Built())
    before = {name: getattr(model[0], name) for name in ("random", "trained", "exact", "kept", "ids", "empty")}
    assert recompute_constants(model, lambda: torch.nn.Sequential(Built()), {"0.kept"}) == ("0.third",)
    assert float(model[0].third) == 1 / 3  # type: ignore[arg-type]
    assert all(getattr(model[0], name) is x for name, x in before.items())


def test_the_other_divisor_of_a_variance_leaves_the_arguments_as_they_are() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 7.0]])
    calls: list[tuple[dict[str, Any], Any]] = [
        ({"dim": 1}, x.var(1, correction=0)),
        ({"dim": 1, "unbiased": False}, x.var(1)),
        ({"dim": 0, "correction": 0}, x.var(0)),
        ({"dim": False}, x.var()),
    ]
    for options, expected in calls:
        given = {"input": x, **options}
        torch.testing.assert_close(other_correction(torch.var, given), expected)
        assert given == {"input": x, **options}


def test_numbers_that_jax_drew_have_the_parameters_of_pytorchs_draw() -> None:
    x, mask = np.array([0.25, -1.0, 2.0]), np.array([True, False, True])
    with GivenMasks([x, mask, abs(x), x, x]):
        normal = torch.empty(3).normal_(3.0, 2.0)
        kept = torch.dropout(torch.tensor([1.0, 2.0, 3.0]), 0.75, True)
        exponential = torch.empty(3).exponential_(4.0)
        plain, alike = torch.randn(3), torch.randn_like(normal)
    assert normal.tolist() == [3.5, 1, 7]
    assert kept.tolist() == [4, 0, 12]
    assert exponential.tolist() == [0.0625, 0.25, 0.5]
    assert plain.tolist() == alike.tolist() == x.tolist()


def test_epsilons_inside_and_outside_of_a_root_are_where_they_say() -> None:
    g, v = jnp.array([2.0, 3.0, 5.0]), jnp.array([0.0, 0.25, 4.0])
    np.testing.assert_allclose(_over_root(g, v, 0.0, True), [2.0, 6.0, 2.5])  # a gradient over the root of 0 is kept
    np.testing.assert_allclose(_over_root(g, v, 0.25, True), g / np.sqrt(v + 0.25), rtol=1e-6)
    np.testing.assert_allclose(_over_root(g, v, 0.25, False), g / (np.sqrt(v) + 0.25), rtol=1e-6)


def test_lines_of_the_user_are_neither_of_the_harness_nor_of_a_library() -> None:
    modules = (F, torch.optim, torch.nn.utils.parametrizations, optax, rewrite, json, np)
    framework, optimizer, utils, library, program, python, numpy = (str(module.__file__) for module in modules)
    parts = (bundle, float64, stages, in_torch, frozen, coverage, imported)
    harness = [str(module.__file__) for module in parts]
    theirs, ours = torch_trace._is_informative, jax_lines.is_of_user
    assert [*map(theirs, (__file__, optimizer, utils, library, program, numpy))] == [True] * 6
    assert [*map(ours, (__file__, optimizer, utils, library, program, numpy))] == [*[True] * 3, False, False, True]
    assert not any(map(theirs, [*harness, framework, python, "<string>"]))
    assert not any(map(ours, [*harness, python, "<string>"]))
    assert ours(str(token_batches.__file__))
    assert theirs(str(token_batches.__file__))
    assert torch_selections.PASSED[0] in str(in_torch.__file__)


def test_the_choices_of_a_proposal_and_of_a_diagnosis_are_tried_from_small_to_large() -> None:
    assert proposal._unions({"a", "b"}, set(), {"c"}) == [{"c"}, {"a", "b"}, {"a", "b", "c"}]
    paths = ["h.0.fc", "h.0.out", "h.1.fc"]
    assert diagnose._scopes(paths, "h.1.fc") == [{*paths}, {"h.0.fc", "h.1.fc"}, {"h.1.fc"}]
    assert diagnose._scopes(paths, "other") == diagnose._scopes(paths, None) == [{*paths}]
    assert diagnose._scopes([], "h.1.fc") == []
    assert diagnose._scopes(["fc"], "fc") == [{"fc"}]
    shapes: dict[str, tuple[int, ...]] = {"a": (3,), "b": (3,), "c": (4,)}
    assert Side(shapes, {"x": np.zeros(3), "y": np.zeros(3), "z": np.zeros(4)}, {}, set()).ambiguous
    assert not Side({"a": (3,), "b": (4,)}, {"x": np.zeros(3), "y": np.zeros(4)}, {}, set()).ambiguous


def test_only_arrays_of_rounded_numbers_are_nudged() -> None:
    errors = np.linspace(-1, 1, in_jax.ERRORS)
    third, half = np.full(5, 1 / 3, np.float32), np.array([0.5, -np.inf, 0.25], np.float32)
    for x in (np.float32(1 / 3), half, np.arange(5), np.full(5, 1 / 3), np.array([True])):
        assert in_jax._nudged_array(x, errors) is x  # type: ignore[arg-type]
    with jax.enable_x64(True):
        nudged = np.asarray(in_jax._nudged_array(third, errors))  # type: ignore[arg-type]
    assert 0 < abs(nudged - third).max() <= in_jax.ULPS * np.spacing(third[0])


SLOW_EXAMPLES = ("explain.diagnose", "explain.locate", "oracle.caches", "oracle.program", "run")
"""Modules whose examples compile or train."""


def test_examples_in_docstrings_hold() -> None:
    folder = Path(planting.__file__).parents[1]
    files = [path.relative_to(folder) for path in folder.rglob("*.py") if "    >>> " in path.read_text()]
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    for name in sorted(names.difference(SLOW_EXAMPLES)):
        found = doctest.testmod(importlib.import_module(f"parity.{name}"))
        assert (found.failed, found.attempted > 0) == (0, True), name
