"""Masks and repeated heads that a module computes are recognized, and attention stays PyTorch's."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.torch_import.rewrites import masks

torch = pytest.importorskip("torch")

T, WINDOW = 6, 3
CAUSAL, WINDOWED, ALL = {"is_causal": True}, {"is_causal": True, "window": WINDOW}, {}


class Masks(torch.nn.Module):
    """The same attention with each mask; `expected` has its arguments, and whether a mask remains."""

    expected = (
        (CAUSAL, False),  # computed by comparing positions
        (CAUSAL, False),  # with the operands exchanged
        (WINDOWED, False),
        (CAUSAL, True),  # with padding
        (CAUSAL, True),  # with padding and segments
        (ALL, False),
        (CAUSAL, False),  # a buffer
        (CAUSAL, False),  # added to the scores
        (ALL, True),  # a prefix is visible to all
        (ALL, True),  # later keys only
        (ALL, True),  # the window slides by two
        (ALL, True),  # padding alone
    )

    def __init__(self):
        super().__init__()
        self.register_buffer("lower", torch.ones(T, T, dtype=torch.bool).tril())

    def forward(self, x, padding, segments):
        query, key = torch.arange(T)[:, None], torch.arange(T)[None]
        causal, window = (key <= query)[None, None], key > query - WINDOW
        visible, same = padding[:, None, None, :], (segments[:, :, None] == segments[:, None, :])[:, None]
        masks = (
            causal.expand(2, -1, T, T),
            query >= key,
            causal & window,
            (causal & visible).expand(2, 1, T, T),
            same & (visible & causal),
            torch.ones(T, T, dtype=torch.bool),
            self.lower[:T, :T],
            torch.zeros(T, T, dtype=x.dtype).masked_fill(~self.lower, -torch.inf),
            causal | (key < 2),
            key >= query,
            (key // 2 <= query // 2) & causal & (key > query - WINDOW - query % 2),
            visible,
        )
        return [torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x, attn_mask=mask) for mask in masks]


def test_causal_masks_are_recognized():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2, T, 4))
    padding = np.arange(T)[None] < np.array([[T], [4]])
    batch = {"x": x, "padding": padding, "segments": np.arange(T)[None] // np.array([[2], [4]])}
    with jax.enable_x64():
        model = jt.from_torch(Masks().double(), batch)
        graph = model._capture(model.params, batch, train=False).graph
        calls = [node.kwargs for node in graph.nodes if "scaled_dot_product" in node.op]
        found = [
            ({key: call[key] for key in ("is_causal", "window") if call.get(key)}, call["attn_mask"] is not None)
            for call in calls
        ]
        assert found == list(Masks.expected)

        theirs = torch.tensor(x, requires_grad=True)
        outputs = Masks().double()(theirs, torch.tensor(padding), torch.tensor(batch["segments"]))
        sum((y**2).sum() for y in outputs).backward()

        def loss(x):
            ours, _ = model({}, {**batch, "x": x})
            return sum((y**2).sum() for y in ours), ours

        gradient, ours = jax.jit(jax.grad(loss, has_aux=True))(x)
        for y, reference in zip(ours, outputs, strict=True):
            np.testing.assert_allclose(y, reference.detach(), rtol=0, atol=1e-14)
        np.testing.assert_allclose(gradient, theirs.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("op", ["le", "lt", "ge", "gt", "eq"])
@pytest.mark.parametrize("exchanged", [False, True])
def test_comparisons_of_positions_are_bands(op, exchanged):
    rng = np.random.default_rng(1)
    for _ in range(50):
        query, key = rng.integers(0, 6, (5, 1)), np.sort(rng.integers(0, 6, (1, 4)))
        operands = (key, query) if exchanged else (query, key)
        visible = np.broadcast_to(getattr(torch, op)(*map(torch.tensor, operands)).numpy(), (5, 4))
        band = masks.compared(f"aten.{op}.Tensor", *operands, 5, 4)
        if not visible.any(-1).all():
            assert band is None
            continue
        keys = np.arange(4)
        np.testing.assert_array_equal((band.first[:, None] <= keys) & (keys < band.end[:, None]), visible)


class GroupedQueries(torch.nn.Module):
    """Attention of 4 heads to 2, which are repeated as by `transformers`, as by `tile`, and once too often."""

    def forward(self, query, key):
        def repeated(x, axis, n):
            b, heads, tokens, width = x.shape
            return x.unsqueeze(axis).expand(b, *([heads, n] if axis == 2 else [n, heads]), tokens, width)

        attend = torch.nn.functional.scaled_dot_product_attention
        in_a_row, in_turn = (repeated(key, axis, 2).reshape(query.shape) for axis in (2, 1))
        rows = repeated(key, 2, 2).reshape(2, 2, 2 * T, 4).repeat_interleave(2, 1)
        return attend(query, in_a_row, in_a_row), attend(query, in_turn, in_turn), attend(query, rows, rows)


def test_repeated_heads_are_recognized():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 4, T, 4)), rng.standard_normal((2, 2, T, 4))
    with jax.enable_x64():
        model = jt.from_torch(GroupedQueries(), (query, key))
        nodes = model._capture({}, (query, key), train=False).graph.nodes
        made_by = {node.name: node for node in nodes}
        calls = [node for node in nodes if "scaled_dot_product" in node.op]
        assert [all(x.name not in made_by for x in node.args) for node in calls] == [True, False, False]

        theirs = [torch.tensor(x, requires_grad=True) for x in (query, key)]
        outputs = GroupedQueries()(*theirs)
        sum((y**2).sum() for y in outputs).backward()

        def loss(inputs):
            ours, _ = model({}, inputs)
            return sum((y**2).sum() for y in ours), ours

        gradients, ours = jax.jit(jax.grad(loss, has_aux=True))((query, key))
        for y, reference in zip(ours, outputs, strict=True):
            np.testing.assert_allclose(y, reference.detach(), rtol=0, atol=1e-14)
        for gradient, x in zip(gradients, theirs, strict=True):
            np.testing.assert_allclose(gradient, x.grad, rtol=0, atol=1e-13)
