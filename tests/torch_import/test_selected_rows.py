"""Rows that a mask selects: programs whose sizes depend on values compute what PyTorch computes, also of no rows."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from parity import check as check_case
from tests.torch_import.by_hand import Made
from tests.torch_import.judge import difference, judged
from tests.torch_import.reference import batch_of, weighted

Tensor = torch.Tensor
ROWS, WIDTH = 5, 3
Batch = tuple[np.ndarray, np.ndarray]


class Selecting(nn.Module):
    """A function of features, a mask and labels, with parts of its own."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn = fn
        self.w = nn.Parameter(torch.linspace(-1.0, 1.2, WIDTH))
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.fn(self, x, mask)


def masks_of(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return masks with some, none, one and all elements."""
    some = np.random.default_rng(1).random(shape) > 0.5
    one = np.zeros(shape, bool)
    one[(1,) * len(shape)] = True
    return [some, np.zeros(shape, bool), one, np.ones(shape, bool), ~some]


def batches_of(shape: tuple[int, ...], rank: int) -> list[Batch]:
    features = [batch_of(*shape) * scale for scale in (1.0, 0.7, -1.1, 0.4, 0.9)]
    return list(zip(features, masks_of(shape[:rank]), strict=True))


def check(fn: Callable[..., Any], batches: list[Batch]) -> None:
    """Compare outputs and gradients of a function with PyTorch's, imported with the first of several batches."""
    module = Selecting(fn)
    with jax.enable_x64():
        model = from_torch(module, batches[0])

        @jax.jit
        def run(params: Any, batch: Batch) -> Any:
            def loss(params: Any) -> Any:
                outputs, _ = model(params, batch, jax.random.key(0))
                return weighted(jax.tree.leaves(outputs), jnp), outputs

            return jax.value_and_grad(loss, has_aux=True)(params)

        for i, batch in enumerate(batches):
            (_, outputs), grads = run(model.params, batch)
            module.zero_grad()
            expected = module(*map(torch.tensor, batch))
            weighted(expected, torch).backward()
            for j, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
                assert difference(np.asarray(ours), theirs.detach().numpy()) < 1e-12, f"output {j} of batch {i}"
            params = dict(module.named_parameters())
            for name, ours in model.names.to_torch(grads).items():
                grad = params[name].grad
                theirs = np.zeros_like(ours) if grad is None else grad.numpy()
                scale = max(1.0, np.abs(theirs[np.isfinite(theirs)]).max(initial=0))
                assert difference(np.asarray(ours), theirs, scale) < 1e-10, f"gradient of {name} of batch {i}"


SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, mask: x[mask],
    "where": lambda x, mask: x[torch.where(mask)],
    "nonzero": lambda x, mask: x[mask.nonzero(as_tuple=True)],
    "places": lambda x, mask: x[tuple(mask.nonzero().t())] if mask.ndim > 1 else x[mask.nonzero()[:, 0]],
    "flat": lambda x, mask: x.flatten(0, mask.ndim - 1)[mask.flatten()],
    "select": lambda x, mask: x.flatten(0, mask.ndim - 1).index_select(0, mask.flatten().nonzero().squeeze(-1)),
    "compared": lambda x, mask: x[mask.double() > 0.5],
    "twice": lambda x, mask: x[mask][x[mask][:, 0] > -0.3],
}
BY_ROW: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "itself": lambda self, y: y * self.w,
    "module": lambda self, y: self.inner(y),
    "norm": lambda self, y: self.norm(y * self.w).tanh(),
    "logarithm": lambda self, y: ((y * self.w).abs() + 1e-300).log(),
    "quotient": lambda self, y: self.w / (y[:, :1] * 2),
    "root": lambda self, y: (y * self.w).square().sum(-1, keepdim=True).sqrt(),
    "softmax": lambda self, y: F.log_softmax(y @ self.inner[0].weight.T, -1),
    "centered": lambda self, y: (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) * self.w),
    "unit": lambda self, y: F.normalize(y * self.w, dim=-1),
    "parts": lambda self, y: torch.cat([y[:, 1:] * self.w[0], y.relu() * self.w], -1),
    "three axes": lambda self, y: (y[:, None] * self.w[:, None]).transpose(1, 2).flatten(1),
    "embedding": lambda self, y: self.table(y.argmax(-1)) * y,
    "picked": lambda self, y: (y * self.w).gather(1, y.argmax(-1, keepdim=True)),
    "of all": lambda self, y: (self.w * (y - y.mean(0))).square(),
    "over rows": lambda self, y: (y * self.w).softmax(0),
    "summed": lambda self, y: (y * self.w).cumsum(0),
    "made": lambda self, y: (
        y * self.w + torch.ones_like(y) + torch.zeros(len(y), WIDTH) + y.new_full((y.shape[0], 1), 2)
    ),
}
REDUCED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda self, z: z.sum(),
    "mean": lambda self, z: z.mean(),
    "mean of rows": lambda self, z: z.mean(0),
    "mean of columns": lambda self, z: z.mean(1).sum(),
    "squares": lambda self, z: (z**2).mean(),
    "norm": lambda self, z: z.norm(),
    "number": lambda self, z: z.sum() / max(len(z), 1),
    "size": lambda self, z: z.sum(0) / z.shape[0],
    "count": lambda self, z: z.sum() * (z.size(0) + 1) + z.numel(),
    "share": lambda self, z: z.sum() * (1.0 / (z.shape[0] + 2)),
    "logsumexp": lambda self, z: z.logsumexp(0).exp(),
    "product": lambda self, z: z.T @ z,
    "pairs": lambda self, z: (z[:, None] - z[None] - 1).pow(2).sum(),
    "any": lambda self, z: (z > 0).any() * z.sum() + (z > -5).all() * self.w.sum(),
    "smooth": lambda self, z: F.smooth_l1_loss(z, z.detach() * 0.5),
    "absolute": lambda self, z: F.l1_loss(z, torch.zeros_like(z), reduction="sum"),
    "mse": lambda self, z: F.mse_loss(z, torch.ones_like(z)),
    "logits": lambda self, z: F.binary_cross_entropy_with_logits(z, (z > 0).double()),
    "cross-entropy": lambda self, z: F.cross_entropy(z, z.argmax(-1) * 0),
    "cross-entropy summed": lambda self, z: F.cross_entropy(z, (z.argmin(-1) > 0).long() * 0, reduction="sum"),
    "smoothed": lambda self, z: F.cross_entropy(z, z.argmax(-1), label_smoothing=0.1),
    "nll": lambda self, z: F.nll_loss(z.log_softmax(-1), z.argmin(-1)),
    "soft labels": lambda self, z: F.cross_entropy(z, z.detach().softmax(-1)),
    "divergence": lambda self, z: F.kl_div(z.log_softmax(-1), (z.detach() * 3).softmax(-1), reduction="batchmean"),
}
COMPOSITIONS = [
    (select, rows, reduce, rank)
    for select, rows, reduce, rank in itertools.product(SELECTIONS, BY_ROW, REDUCED, (1, 2))
]
random.Random(0).shuffle(COMPOSITIONS)
GROUP = 6


def composed(chosen: list[tuple[str, str, str, int]], self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    rows = [(BY_ROW[by](self, SELECTIONS[select](x, mask)), reduce) for select, by, reduce, _ in chosen]
    return tuple(REDUCED[reduce](self, y) for y, reduce in rows)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is")
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("i", range(4))
def test_reductions_of_selected_rows(i: int, rank: int) -> None:
    chosen = [x for x in COMPOSITIONS if x[3] == rank][GROUP * i : GROUP * (i + 1)]
    shape = (ROWS, WIDTH) if rank == 1 else (2, 4, WIDTH)
    check(functools.partial(composed, chosen), batches_of(shape, rank))


def by_index_add(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """A mixture of experts, each on its own tokens."""
    scores = (x @ self.experts[0].weight.T).softmax(-1)
    weights, chosen = scores.topk(2, dim=-1)
    out, second = torch.zeros_like(x), torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        row, place = torch.where(chosen == i)
        out.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        idx = torch.where(chosen[:, 0] == i)[0]
        if idx.numel() > 0:
            second[idx] += expert(x[idx]) * scores[idx, i].unsqueeze(-1)
    return out, second


def by_mask(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    out = x * self.w
    out[mask] = self.inner(x[mask])
    added = x * self.w
    added[mask] += self.inner(added[mask])
    scattered = (x * self.w).masked_scatter(mask[..., None].expand_as(x), self.norm(x[mask]))
    both = torch.zeros_like(x)
    both[mask] = x[mask] * self.w
    both[~mask] = self.inner(x[~mask]).log().nan_to_num(0.5)
    return out, added, scattered, both


def by_places(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    idx = torch.nonzero(mask).squeeze(1)
    y = x[idx] * self.w
    labels = y.argmax(-1)
    per_label = torch.zeros(WIDTH, WIDTH).to(x).index_add(0, labels, y)
    counts = torch.zeros(WIDTH).to(x).scatter_add(0, labels, torch.ones_like(labels).to(x))
    copied = x.index_copy(0, idx, self.inner(y))
    scattered = (x * self.w).scatter(0, idx[:, None].expand(-1, WIDTH), y.exp())
    accumulated = x.index_put((idx, labels), y.sum(-1), accumulate=True)
    picked = y[torch.arange(len(y)), labels]
    return per_label, counts * self.w, copied, scattered, accumulated, picked.sum()


def by_guards(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    out, total = torch.zeros_like(x), x.sum() * self.w.sum()
    for i, expert in enumerate(self.experts):
        idx = torch.where(mask & (x[:, i] > 0))[0]
        if len(idx) == 0:
            continue
        out.index_add_(0, idx, expert(x[idx]))
        total = total + F.cross_entropy(expert(x[idx]), idx * 0, reduction="sum")
    chosen = x[mask]
    if chosen.shape[0]:
        out = out.index_add(0, torch.where(mask)[0], chosen * self.w)
    return out, total


WRITTEN = {"index_add": by_index_add, "mask": by_mask, "places": by_places, "guards": by_guards}


@pytest.mark.parametrize("name", WRITTEN)
def test_selected_rows_are_written_back(name: str) -> None:
    check(WRITTEN[name], batches_of((ROWS, WIDTH), 1))


def test_a_mask_of_one_element() -> None:
    def fn(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = self.inner(x[mask])
        written = x.index_add(0, torch.where(mask)[0], y)
        return y.mean(0), written, F.cross_entropy(y, y.argmax(-1)), (y @ self.w).softmax(0).sum(), y.sum() / len(y)

    x = batch_of(1, WIDTH)
    check(fn, [(x, np.array([True])), (x, np.array([False]))])


def spread(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    y = x[mask] * self.w
    return y.std(), y.var(0), y.std(0, unbiased=False), y.var(dim=-1).sum()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is")
def test_spread_of_selected_rows_is_that_of_pytorch() -> None:
    check(spread, batches_of((ROWS, WIDTH), 1))


def extremes(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    y = x[mask] * self.w
    return y.max(), y.amin(0), y.max(0).values, y.abs().max(), y[y.argmax(0), torch.arange(WIDTH)]


def test_extremes_of_selected_rows() -> None:
    batches = batches_of((ROWS, WIDTH), 1)
    check(extremes, [batch for batch in batches if batch[1].any()])


def by_equal_masks(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Masks that are computed again for each use."""
    labels = x.argmax(-1).where(mask, -100)
    both = torch.zeros_like(x)
    both[labels != -100] = self.inner(x[labels != -100])
    total = x.sum() * self.w.sum()
    if (labels != -100).nonzero().numel() > 0:
        total = total + (x[labels != -100] * self.inner(x)[labels != -100]).sum()
    loss = F.cross_entropy(self.inner(x)[labels != -100], labels[labels != -100])
    return both, loss, (x[mask] * self.w)[x[mask][:, 0] > 0].sum(), total


def by_products(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    z = F.normalize(self.inner(x)[mask], dim=-1)
    similar = z @ z.T / 0.5
    apart = similar.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return (
        F.cross_entropy(similar, torch.arange(len(z))),
        torch.einsum("nd,ne->de", z, x[mask] * self.w),
        apart.logsumexp(1).sum(),
        F.cosine_embedding_loss(z, x[mask], torch.ones(len(z))),
        (x @ z.T).softmax(-1) @ z.sum(-1),
    )


def by_unique(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    numbers = torch.stack([mask * torch.arange(ROWS), x.argmax(-1)])
    values, inverse, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
    runs, places, lengths = mask.unique_consecutive(return_inverse=True, return_counts=True)
    per_value = (values * counts + len(values)).to(x)
    return per_value.sum() * self.w, inverse * x.sum(), (runs / lengths).sum() * self.w, places * self.w.sum()


@pytest.mark.parametrize("fn", [by_equal_masks, by_products, by_unique])
def test_rows_of_masks_that_are_equal_and_products_of_rows(fn: Callable[..., Any]) -> None:
    check(fn, batches_of((ROWS, WIDTH), 1))


def test_float32_source_and_folder(tmp_path: Any) -> None:
    module = Selecting(lambda self, x, mask: (self.inner(x)[mask].mean(), x[mask].std() * self.w)).float()
    x, mask = batches_of((ROWS, WIDTH), 1)[0]
    batch = (x.astype(np.float32), mask)
    model = from_torch(module, batch)
    expected = [y.detach().numpy() for y in module(*map(torch.tensor, batch))]
    scope: dict[str, Any] = {}
    exec(model.source(), scope)
    model.save(tmp_path / "model")
    again = load_imported(tmp_path / "model")
    for found in (
        model(model.params, batch, jax.random.key(0))[0],
        scope["model"](model.params, batch, jax.random.key(0))[0],
        again(again.params, batch, jax.random.key(0))[0],
    ):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-6)
    assert check_case(model.case(), steps=2).passed


def mixture(family: str) -> Made:
    """Return a language model of `transformers` whose experts are called on their own tokens."""
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False}
    experts = {"num_local_experts": 3} if family == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 6}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **experts, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return getattr(transformers, f"{family}ForCausalLM")(config), {"input_ids": np.arange(12).reshape(2, 6) % 11}


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_experts_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    # RMSNorm and the router compute in float32.
    assert judged(lambda: mixture(family), bar=1e-6) == "proved"


def two_guards(self: Any, x: Tensor, mask: Tensor, together: bool) -> Tensor:
    """Rows of a mask that are skipped if another one selects none."""
    rows, others = x[mask], x[~mask]
    total = (x * self.w).sum()
    if together:
        return total + (rows * self.w).sum() if len(rows) > 0 and len(others) > 0 else total
    is_given, are_given = bool(len(rows) > 0), bool(len(others) > 0)
    return total + (rows * self.w).sum() if is_given and are_given else total


REFUSED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a result": lambda self, x, mask: x[mask] * self.w,
    "the last row": lambda self, x, mask: x[mask][-1] * self.w,
    "a part": lambda self, x, mask: (x[mask][:2] * self.w).sum(),
    "rows beside others": lambda self, x, mask: (torch.cat([x[mask], x]) * self.w).sum(),
    "sorted": lambda self, x, mask: (x[mask] * self.w).sort(0).values.cumsum(0).mean(),
    "another number": lambda self, x, mask: x.sum() * self.w if len(x[mask]) > 2 else self.w,
    "another result": lambda self, x, mask: (x[mask] * self.w).mean() if len(x[mask]) > 0 else self.w.sum(),
    "a label": lambda self, x, mask: F.cross_entropy(x[mask].T * self.w[:, None], x.argmax(0) * 0, label_smoothing=0.1),
    "one of two": lambda self, x, mask: two_guards(self, x, mask, together=True),
    "one of two, told before": lambda self, x, mask: two_guards(self, x, mask, together=False),
    "one row": lambda self, x, mask: (x[mask].squeeze(0).mean(0) * self.w).sum(),
    "squeezed": lambda self, x, mask: (x[mask.nonzero().squeeze()] * self.w).sum(),
    "changed places": lambda self, x, mask: sum((x * i * self.w).sum() for i in mask.nonzero().add_(1)) + self.w.sum(),
    "view": lambda self, x, mask: (x[mask].reshape(WIDTH, -1) * 2).sum(1) * self.w,
    "repeated": lambda self, x, mask: (x[mask].repeat(2, 1) * self.w).sum(),
    "batch norm": lambda self, x, mask: F.batch_norm(x[mask] * self.w, None, None, training=True).pow(3).sum(),
    "split": lambda self, x, mask: sum(part.sum() for part in (x[mask] * self.w).chunk(2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_by_row_is_refused_by_line(name: str) -> None:
    with jax.enable_x64(), pytest.raises(UserError, match=r"test_selected_rows\.py:\d+") as caught:
        from_torch(Selecting(REFUSED[name]), batches_of((ROWS, WIDTH), 1)[0])
    assert "\n" not in str(caught.value)
    assert "ops=" not in str(caught.value)
