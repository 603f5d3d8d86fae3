"""PyTorch's model uses the dropout masks of JAX's."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax import lax
from torch.nn import functional as F

import jaxtrain
from jaxtrain.errors import UserError
from jaxtrain.models.attention import attention
from parity.case import Case
from parity.cases.built_in import bert_case, cnn_bn_case, gpt2_case, llama_case, mlp_case, t5_case, vit_case
from parity.oracle.in_torch import InFloat64
from parity.run import check
from parity.sides import torch_side
from parity.sides.randomness import GivenMasks, dropout_mask_fn, dropout_masks, permute_masks

KEY = jax.random.key(0)


def keep(key: jax.Array) -> jax.Array:
    return jax.random.bernoulli(key, 0.5, (4,))


def masks_of(draw: Callable[[jax.Array], Any]) -> list[np.ndarray]:
    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        return jaxtrain.Loss(sum(jnp.sum(x.astype(float)) for x in jax.tree.leaves(draw(rng))), 1), {}

    return [np.asarray(mask) for mask in jax.jit(dropout_mask_fn(loss_fn))(None, None, KEY, None)]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_the_masks_are_those_of_the_training_step(precision: str) -> None:
    case, bits = mlp_case.case(dropout=0.5), np.random.default_rng(0).normal(size=(32, 512))

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        loss, _ = case.loss_fn(params, batch, rng)
        # Drawn as in the model.
        mask = jax.random.bernoulli(jax.random.split(rng, 1)[0], 0.5, bits.shape)
        return loss, {"fingerprint": jnp.where(mask, jnp.asarray(bits, np.float32), 0).sum()}

    step = jaxtrain.train_step(loss_fn, optax.sgd(0.1), precision=precision, accumulate=2)
    masks = dropout_masks(case, precision, accumulate=2, steps=3, seed=7)
    with jax.enable_x64(precision == "fp64"), jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), case.params_like)
        state = step.init(params, seed=7)
        for i, batch in enumerate(case.batches(0, 3)):
            state, metrics = step(state, jax.tree.map(jnp.asarray, batch))
            window = [mask for (mask,) in masks[2 * i : 2 * i + 2]]
            expected = np.mean([bits[mask].sum() for mask in window])
            assert float(metrics["fingerprint"]) == pytest.approx(expected, rel=1e-4)


def test_masks_are_in_the_order_of_gpt2s_layers() -> None:
    (masks,) = dropout_masks(gpt2_case.case(dropout=0.1), "fp32", accumulate=4, steps=1, seed=0)[:1]
    hidden, weights = (4, 16, 32), (4, 4, 16, 16)
    assert [mask.shape for mask in masks] == [hidden, *[weights, hidden, hidden] * 2]
    assert len({mask.tobytes() for mask in masks}) == 7


def test_a_model_without_dropout_draws_no_masks() -> None:
    assert dropout_masks(cnn_bn_case.case(), "fp32", accumulate=1, steps=2, seed=0) == [[], []]


def test_scans_are_unrolled_in_the_order_they_run() -> None:
    keys = jax.random.split(KEY, 3)
    for reverse in (False, True):

        def scanned(key: jax.Array, reverse: bool = reverse) -> Any:
            count, kept = lax.scan(
                lambda n, key: (n + 1, keep(key)), jnp.zeros([], np.int32), jax.random.split(key, 3), reverse=reverse
            )
            # The scan's outputs feed what follows it.
            return count, kept, jax.random.bernoulli(key, kept.mean(), (5,))

        *found, last = masks_of(scanned)
        np.testing.assert_array_equal(found, [keep(key) for key in (keys[::-1] if reverse else keys)])
        np.testing.assert_array_equal(last, scanned(KEY)[2].astype(bool))


def test_masks_are_found_inside_calls_and_vmap() -> None:
    @jax.custom_jvp
    def custom(key: jax.Array) -> jax.Array:
        return keep(key)

    custom.defjvp(lambda primals, _: (custom(*primals), None))
    for inside in (jax.jit(keep), jax.checkpoint(keep), custom):
        np.testing.assert_array_equal(masks_of(inside), [keep(KEY)])
    keys = jax.random.split(KEY, 3)
    np.testing.assert_array_equal(masks_of(lambda _: jax.vmap(keep)(keys)), [[keep(key) for key in keys]])


def test_the_mask_of_attention_block_by_block_is_found() -> None:
    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        x = params * batch
        return jaxtrain.Loss(attention(x, x, x, dropout=0.5, rng=rng).sum(), 1), {}

    batch, key = jnp.ones((2, 1024, 2, 1)), jax.random.key(1)
    (mask,) = jax.jit(dropout_mask_fn(loss_fn))(1.0, batch, key, None)
    np.testing.assert_array_equal(mask, jax.random.bernoulli(key, 0.5, (2, 2, 1024, 1024)))


def test_a_mask_of_pairs_of_rows_is_found_once() -> None:
    """A loss that sums over [B, B] is called once more, to warn of pairs that are not meant."""

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        kept = jnp.where(jax.random.bernoulli(rng, 0.5, (4, 4)), params * batch[None, :], 0.0)
        return jaxtrain.Loss(kept.sum(), 1), {}

    (mask,) = dropout_mask_fn(loss_fn)(1.0, jnp.ones(4), KEY, None)
    np.testing.assert_array_equal(mask, jax.random.bernoulli(KEY, 0.5, (4, 4)))


def test_flaxs_dropout_masks_are_found() -> None:
    dropout = nnx.Dropout(0.25, deterministic=False)
    (mask,) = masks_of(lambda key: dropout(jnp.ones((4, 3)), rngs=nnx.Rngs(dropout=key)))
    assert mask.shape == (4, 3)


@pytest.mark.parametrize(
    ("draw", "where"),
    [
        (lambda key: lax.cond(key is KEY, keep, keep, key), "cond"),
        (lambda key: lax.while_loop(lambda x: x.all(), lambda _: keep(key), keep(key)), "while"),
    ],
)
def test_a_draw_that_depends_on_values_raises(draw: Callable[[jax.Array], Any], where: str) -> None:
    with pytest.raises(UserError, match=f"drawn inside {where}"):
        masks_of(draw)


def masks(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.random(shape) < 0.5 for shape in shapes]


def test_masks_of_images_are_transposed_to_channels_first() -> None:
    (mask,) = masks((2, 5, 4, 3))
    with GivenMasks([mask]):
        dropped = F.dropout(torch.ones(2, 3, 5, 4), 0.5)
    np.testing.assert_array_equal(dropped.numpy(), 2.0 * mask.transpose(0, 3, 1, 2))


def test_whole_channels_are_dropped() -> None:
    (mask,) = masks((2, 1, 1, 3))
    with GivenMasks([mask]):
        dropped = F.dropout2d(torch.ones(2, 3, 5, 4), 0.5)
    np.testing.assert_array_equal(dropped.numpy(), np.broadcast_to(2.0 * mask.transpose(0, 3, 1, 2), (2, 3, 5, 4)))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_mask_of_attention_is_applied_to_its_weights(rate: float) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.manual_seed(0), dtype=torch.float64)
    (mask,) = masks((2, 4, 5, 5))
    with GivenMasks([mask]):
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
    weights = torch.softmax(q @ k.mT / 8**0.5, -1) * torch.tensor(mask) / (1 - rate)
    torch.testing.assert_close(attended, weights @ v)


def test_autocast_applies_inside() -> None:
    (mask,) = masks((2, 3))
    linear = torch.nn.Linear(4, 3)
    with torch.autocast("cpu", torch.bfloat16), GivenMasks([mask]):
        dropped = F.dropout(linear(torch.ones(2, 4)), 0.1)
    assert dropped.dtype == torch.bfloat16
    np.testing.assert_array_equal(dropped.detach().float().numpy() == 0, ~mask)


def test_nothing_is_drawn_from_pytorchs_own_generator() -> None:
    before = torch.get_rng_state()
    with GivenMasks(masks((2, 3))):
        F.dropout(torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_uniform_and_normal_numbers_are_shared_in_the_order_of_the_draws() -> None:
    def draw(key: jax.Array) -> Any:
        drop, uniform, normal = jax.random.split(key, 3)
        return keep(drop), jax.random.uniform(uniform, (4,)), jax.random.normal(normal, (4,))

    given = masks_of(draw)
    with GivenMasks(given):
        drawn = [torch.empty(4).bernoulli_(0.5), torch.rand(4), torch.randn_like(torch.ones(4))]
    for ours, theirs in zip(given, drawn, strict=True):
        np.testing.assert_array_equal(theirs.numpy(), ours)
    with (
        pytest.raises(UserError, match="draws random numbers where the PyTorch model calls"),
        GivenMasks(given[1:]),
    ):
        torch.empty(4).bernoulli_(0.5)


def test_what_follows_a_seed_of_the_model_is_its_own() -> None:
    torch.manual_seed(0)
    own = torch.randn(2), F.dropout(torch.ones(2, 3)), torch.rand_like(torch.ones(2))
    for wide in (nullcontext, InFloat64):
        with wide(), GivenMasks(masks((2, 3))):
            F.dropout(torch.ones(2, 3))
            torch.manual_seed(0)
            found = torch.randn(2), F.dropout(torch.ones(2, 3)), torch.rand_like(torch.ones(2))
        assert all(torch.equal(x.float(), expected) for x, expected in zip(found, own, strict=True))


@pytest.mark.parametrize(("given", "drops"), [(2, 1), (1, 3), (0, 1), (1, 0)])
def test_extra_or_missing_masks_raise(given: int, drops: int) -> None:
    expected = f"the JAX model drew {given} dropout masks, the PyTorch model {drops}: apply dropout"
    model = torch.nn.Sequential(*[torch.nn.Dropout(0.5) for _ in range(drops)])
    with pytest.raises(UserError, match=expected), GivenMasks(masks(*[(2, 3)] * given)):
        model(torch.ones(2, 3))


def test_a_mask_of_another_shape_raises() -> None:
    expected = r"mask is \[2, 3\], the PyTorch model's \[3, 2\]: apply dropout to the same"
    with pytest.raises(UserError, match=expected), GivenMasks(masks((2, 3))):
        F.dropout(torch.ones(3, 2))


def test_rows_are_permuted_with_their_micro_batch() -> None:
    rows, shared = masks((4, 3), (1, 3))
    order = np.array([2, 0, 3, 1])
    found = permute_masks([rows, shared], order)
    np.testing.assert_array_equal(found[0], rows[order])
    np.testing.assert_array_equal(found[1], shared)
    with pytest.raises(UserError, match=r"the first axis of a dropout mask \[8, 3\] is not the 4 rows"):
        permute_masks(masks((8, 3)), order)


@pytest.mark.parametrize(
    "case",
    [
        module.case(dropout=0.2)
        for module in (mlp_case, cnn_bn_case, gpt2_case, bert_case, vit_case, t5_case, llama_case)
    ],
)
def test_reordering_rows_does_not_change_the_losses_under_dropout(case: Case) -> None:
    given = dropout_masks(case, "fp64", accumulate=2, steps=2, seed=0)
    plain, other = (
        torch_side.run(case, "fp64", accumulate=2, steps=2, masks=given, variant=torch_side.Variant(reorder))
        for reorder in (None, 1)
    )
    np.testing.assert_allclose(other.losses, plain.losses, rtol=1e-12)
    changed = [not np.array_equal(other.grads[name], gradient) for name, gradient in plain.grads.items()]
    assert any(changed), "nothing was reordered"


def test_dropout_at_different_places_raises() -> None:
    case = mlp_case.case(dropout=0.1)
    expected = (
        r"the JAX model drew 1 dropout masks, the PyTorch model 0: .*; JAX draws at jaxtrain/models/layers/dropout\.py:"
    )
    with pytest.raises(UserError, match=expected):
        check(dataclasses.replace(case, torch_model=mlp_case.case().torch_model), steps=1)
    with pytest.raises(UserError, match="the JAX model drew 0 dropout masks, the PyTorch model 1"):
        check(dataclasses.replace(mlp_case.case(), torch_model=case.torch_model), steps=1)


def test_a_mask_of_merged_rows_is_reshaped_to_the_activation():
    mask = np.arange(12).reshape(6, 2) % 3 == 0
    with GivenMasks([mask]):
        dropped = F.dropout(torch.ones(2, 3, 2), 0.5)
    np.testing.assert_array_equal(dropped.numpy() != 0, mask.reshape(2, 3, 2))
    with (
        pytest.raises(UserError, match=r"mask is \[4, 3\], the PyTorch model's \[2, 3, 2\]"),
        GivenMasks([np.ones((4, 3), bool)]),
    ):
        F.dropout(torch.ones(2, 3, 2), 0.5)
