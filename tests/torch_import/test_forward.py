"""What `forward` does besides computing: PyTorch's values, gradients and buffers, or a refusal with the line."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from parity import check
from tests.torch_import.reference import Function, batch_of, compared, weighted

F64 = {"dtype": torch.float64}


class Average(nn.Module):
    """A moving average that is assigned to a buffer in one of the ways people write."""

    def __init__(self, write: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("mean", torch.zeros(3, **F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, self.mean * 0.9 + x.detach().mean(0) * 0.1)
        return x * self.mean


def assign(part: Any, new: torch.Tensor) -> None:
    part.mean = new


def assign_data(part: Any, new: torch.Tensor) -> None:
    part.mean.data = new


@torch.no_grad()
def copy_to_data(part: Any, new: torch.Tensor) -> None:
    part.mean.data.mul_(0).add_(new)


class Delayed(nn.Module):
    """A running sum, and two buffers that are its value before."""

    def __init__(self) -> None:
        super().__init__()
        for i, name in enumerate(("now", "last", "kept")):
            self.register_buffer(name, torch.arange(3, **F64) + i)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.last.copy_(self.now)
            self.kept.copy_(self.now)
            self.now.add_(x.mean(0))
        return x * self.last + self.now * self.kept


def fill_diagonal(module: Any, x: torch.Tensor) -> torch.Tensor:
    square = ((x * module.w).T @ x).fill_diagonal_(5.0)
    return (square * x[:3, :, None]).fill_diagonal_(2.0) * module.w


def packed(module: Any, x: torch.Tensor) -> Any:
    sequences = pack_padded_sequence(
        (x * module.w)[..., None], torch.tensor([2, 3, 1, 3]), batch_first=True, enforce_sorted=False
    )
    outputs, last = module.rnn(sequences)
    padded, _ = pad_packed_sequence(outputs, batch_first=True, padding_value=0.5)
    return padded, last


def only_if_finite(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    assert not torch.isnan(y).any()
    if torch.rand([]) < 0.0 or random.random() < 0.0:
        return x
    assert y.isinf().sum() == 0
    return y if torch.isfinite(y).all() else y.clamp(-1, 1)


def integers_without_gradient(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    places = y.argmax(1)
    with torch.no_grad():
        places[0] = 1
    return y[:, places]


def converted(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.layer = module.layer.to(x.dtype)
    return module.layer(x * module.w)


def dense(*shape: int) -> nn.Linear:
    return nn.Linear(*shape, **F64)


CASES: dict[str, Callable[[], nn.Module]] = {
    "assigned_buffer": lambda: Function(lambda m, x: m.part(x * m.w), part=Average(assign)),
    "assigned_data": lambda: Function(lambda m, x: m.part(x * m.w), part=Average(assign_data)),
    "changed_data": lambda: Function(lambda m, x: m.part(x * m.w), part=Average(copy_to_data)),
    "copied_buffers": lambda: Function(lambda m, x: m.part(x * m.w), part=Delayed()),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(dense(3, 4)), dense(4, 2)),
    "weight_norm_of_all": lambda: parametrizations.weight_norm(dense(3, 4), dim=None),
    "cumulative_batch_norm": lambda: nn.BatchNorm1d(3, momentum=None, **F64),
    "fill_diagonal": lambda: Function(fill_diagonal),
    "packed": lambda: Function(packed, rnn=nn.LSTM(1, 2, 2, batch_first=True, bidirectional=True, **F64)),
    "packed_gru": lambda: Function(packed, rnn=nn.GRU(1, 2, batch_first=True, bidirectional=True, **F64)),
    "packed_rnn": lambda: Function(packed, rnn=nn.RNN(1, 2, 2, nonlinearity="relu", batch_first=True, **F64)),
    "projected": lambda: Function(lambda m, x: m.rnn(x * m.w), rnn=nn.LSTM(3, 4, proj_size=2, **F64)),
    "checkpoint": lambda: Function(
        lambda m, x: checkpoint(m.layer, x * m.w, use_reentrant=True), layer=nn.Sequential(dense(3, 3), nn.Tanh())
    ),
    "scaled_embedding": lambda: Function(
        lambda m, x: m.part(torch.tensor([[1, 2], [1, 1]])) * m.w,
        part=nn.Embedding(4, 3, scale_grad_by_freq=True, **F64),
    ),
    "variance": lambda: Function(lambda m, x: torch.var(x * m.w, dim=1, unbiased=False)),
    "only_if_finite": lambda: Function(only_if_finite),
    "integers_without_gradient": lambda: Function(integers_without_gradient),
    "converted": lambda: Function(converted, layer=dense(3, 3)),
    "masked_transformer": lambda: Function(
        lambda m, x: m.layer((x * m.w)[None], x[None], torch.ones(4, 4, **F64).triu(1) * -9.0),
        layer=nn.TransformerDecoder(nn.TransformerDecoderLayer(3, 1, 4, 0.0, batch_first=True, **F64), 1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_buffers_are_pytorchs(name: str) -> None:
    torch.manual_seed(0)
    differences, _ = compared(CASES[name](), batch_of(4, 3))
    assert max(differences) <= 1e-14, differences


def changed_by_data(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    y.data[:, 0] *= 2
    return y


def changed_parameter(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.w.data = module.w * 0.9
    return x * module.w


def reentrant(module: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module.layer, x, use_reentrant=True) * module.w


def checkpointed_statistics(module: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: module.layer(y), x * module.w, use_reentrant=False)


def number(module: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * module.w)[:, : int(x.argmax())]


def until(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    while y.abs().max() > 0.1:
        y = y / 2 + 0.01 * torch.tanh(y)
    return y


def until_masked(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    for _ in range(20):
        y = torch.where(y.abs().max() > 0.1, y / 2 + 0.01 * torch.tanh(y), y)
    return y


def times(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    for _ in range(int(x.argmax())):
        y = torch.tanh(y)
    return y


def test_loops_by_values_are_those_of_the_example_and_a_remedy_works_for_every_batch() -> None:
    x = batch_of(4, 3).astype(np.float32)
    model = jt.from_torch(Function(until).float(), x)
    with pytest.raises(UserError, match=r"forward reads True where it read False of the example .*: while y.abs"):
        model(model.params, 30 * x)
    assert np.isnan(jax.jit(model)(model.params, 30 * x)[0]).all()
    with pytest.raises(UserError, match=r"depends on floating-point values.*for _ in range\(int\(x.argmax\(\)\)\)"):
        jt.from_torch(Function(times).float(), x)
    differences, model = compared(Function(until_masked), batch_of(4, 3))
    assert max(differences) <= 1e-14
    with jax.enable_x64():
        ours = model(model.params, batch_of(4, 3))[0]
    np.testing.assert_allclose(ours, until(Function(until_masked), torch.tensor(batch_of(4, 3))).detach(), rtol=1e-14)


@pytest.mark.parametrize(
    ("fn", "message", "line"),
    [
        (changed_by_data, "changed in place by its data", "y.data[:, 0] *= 2"),
        (changed_parameter, "changed in place by its data", "module.w.data = module.w * 0.9"),
        (reentrant, "pass use_reentrant=False", "use_reentrant=True) * module.w"),
        (checkpointed_statistics, "changes inside torch.utils.checkpoint", "module.layer(y)"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_its_line(fn: Any, message: str, line: str) -> None:
    module = Function(fn, layer=nn.BatchNorm1d(3, **F64))
    with pytest.raises(UserError) as error:
        jt.from_torch(module, batch_of(4, 3))
    assert all(text in str(error.value) for text in (message, line, "test_forward.py:"))


class Shaped(nn.Module):
    """Reads the shape alone of what one layer computes, and rounds what another does."""

    def __init__(self) -> None:
        super().__init__()
        self.shaped, self.rounded, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.zeros_like(self.shaped(x)) + self.rounded(x).round() + x)


def test_parameters_without_a_gradient_in_pytorch_are_frozen() -> None:
    module = Shaped()
    model = jt.from_torch(module, np.ones((4, 3), np.float32))
    module(torch.ones(4, 3)).sum().backward()
    without = {name for name, p in module.named_parameters() if p.grad is None}
    assert without == {name for name in model.params if model.frozen(name)} == {"shaped.weight", "shaped.bias"}


@dataclass
class Answer:
    logits: torch.Tensor
    parts: dict[str, torch.Tensor | None]


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, repeats: int = 1, kind: str = "sum") -> Answer:
        for _ in range(repeats):
            x = self.layer(x)
        return Answer(x, {"total": getattr(x, kind)(-1), "none": None})


def test_numbers_and_strings_of_the_example_are_constants() -> None:
    x = np.ones((2, 3), np.float32)
    model = jt.from_torch(Options(), {"x": x, "repeats": 2, "kind": "mean"})
    outputs, _ = model(model.params, {"x": x})
    with torch.no_grad():
        theirs = model.call(model.to_torch(), {"x": torch.tensor(x)})
    np.testing.assert_allclose(outputs["logits"], theirs.logits, rtol=1e-6)
    np.testing.assert_allclose(outputs["parts"]["total"], theirs.parts["total"], rtol=1e-6, atol=1e-7)
    assert outputs["parts"]["none"] is None
    assert model(model.params, {"x": x, "repeats": 2})
    with pytest.raises(UserError, match="'repeats' is the constant 2 of the imported module"):
        model(model.params, {"x": x, "repeats": 3})
    with pytest.raises(UserError, match="leave it out of batches"):
        jax.jit(model)(model.params, {"x": x, "repeats": 2})


class Noisy(nn.Module):
    """Normal, exponential and integer draws, dropout inside a checkpoint, and float32 beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.steps = nn.Embedding(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.layer, x + self.steps(torch.randint(0, 7, (len(x),))), use_reentrant=False)
        noise = torch.empty_like(y).normal_(1.0, 2.0) + torch.empty_like(y).exponential_(3.0)
        largest, _ = torch.topk(nn.functional.linear((y * noise).float(), self.layer[0].weight).flatten(), 5)
        return largest


def test_draws_and_dtypes_are_shared_with_pytorch() -> None:
    verdict = check(jt.from_torch(Noisy(), np.ones((4, 3), np.float32)).case(), steps=2)
    assert verdict.passed, verdict.lines


class Scaled(torch.nn.Module):
    def forward(self, x, scale=1.0):
        return x * scale


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (
            Scaled(),
            {"image": np.ones(3, np.float32)},
            r"Scaled\.forward cannot take the keys image of the example \(.*'(image|x)'.*\): the example's keys are "
            r"the arguments of forward: x, scale; rename them, or say how the module takes a batch with call=$",
        ),
        (Scaled(), {}, r"missing a required argument: 'x'"),
        (Scaled(), (np.ones(3, np.float32),) * 3, r"cannot take positional arguments .*too many .*: the arguments of "),
        (
            np.ones(3),
            np.ones(3, np.float32),
            r"^module must be a torch\.nn\.Module, got ndarray: give the module first",
        ),
        (Scaled, np.ones(3, np.float32), r"got the class Scaled: use Scaled\(…\)"),
    ],
)
def test_a_wrong_module_or_example_is_explained_by_the_arguments_of_forward(module, example, message):
    with pytest.raises(UserError, match=message):
        jt.from_torch(module, example)


def test_a_lazy_module_is_made_by_a_call_of_a_copy() -> None:
    module = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Dropout(0.0), nn.LazyLinear(2))
    x = batch_of(4, 3).astype(np.float32)
    model = jt.from_torch(module, x)
    assert all(map(torch.nn.parameter.is_lazy, module.parameters()))
    made = model.original.module()
    assert made.training
    assert made[1].num_batches_tracked == 0
    outputs, state = model(model.params, x, jax.random.key(0), model.state)
    np.testing.assert_allclose(outputs, made(torch.tensor(x)).detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(state["1.running_var"], made[1].running_var, rtol=1e-5)
    with pytest.raises(UserError, match=r"Linear has lazy parameters and cannot be called: .*: call it once before"):
        jt.from_torch(nn.LazyLinear(5), {"wrong": x})


def chosen(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
    a, b, c = x * m.w
    of_two = max(a, 0.0), max(0.0, a), min(a, b), max(b, a), min(a, 0), max(-0.5, c)
    return [y * m.w.sum().exp() for y in (*of_two, max(a, b, c), min([c, b, a]), max(0.0, a, c), min(a, b, 0.0))]


@pytest.mark.parametrize(
    "x", [(1.0, 2.0, 3.0), (0.0, 1.0, 0.0), (1.0, 1.0, -1.0), (np.nan, 1.0, 0.5), (0.5, 1.0, np.nan)]
)
def test_max_and_min_of_python_choose_an_element(x: tuple[float, ...]) -> None:
    module = Function(chosen)
    with jax.enable_x64():
        model = from_torch(module, np.array([2.0, -1.0, 0.25]))

        @jax.jit
        @jax.value_and_grad
        def run(params: Any, x: Any) -> Any:
            return weighted(model(params, x)[0], jnp)

        found, grads = run(model.params, np.array(x))
    expected = weighted(module(torch.tensor(x, dtype=torch.float64)), torch)
    expected.backward()
    np.testing.assert_allclose(found, expected.item(), rtol=1e-14)
    assert module.w.grad is not None
    np.testing.assert_allclose(grads["w"], module.w.grad, rtol=1e-14)
