"""Parameters that `forward` updates, as of a momentum encoder, over steps of training beside PyTorch in float64."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from parity import check
from tests.torch_import.judge import at_path
from tests.torch_import.steps import batches, equal, in_float64

pytestmark = pytest.mark.usefixtures(in_float64.__name__)


def assigned_data(p: Any, q: Any, m: float) -> None:
    p.data = p.data * m + q.data * (1 - m)


def in_place(p: Any, q: Any, m: float) -> None:
    p.mul_(m).add_(q, alpha=1 - m)


def data_in_place(p: Any, q: Any, m: float) -> None:
    p.data.mul_(m).add_((1 - m) * q.detach().data)


def copied(p: Any, q: Any, m: float) -> None:
    p.copy_(m * p + (1 - m) * q)


def data_copied(p: Any, q: Any, m: float) -> None:
    p.data.copy_(p.data + (q.data - p.data) * (1 - m))


def interpolated(p: Any, q: Any, m: float) -> None:
    p.lerp_(q, 1 - m)


def by_rows(p: Any, q: Any, m: float) -> None:
    p[:1] = q[:1] * (1 - m) + m * p[:1]


UPDATES: dict[str, Callable[[Any, Any, float], None]] = {
    fn.__name__: fn for fn in (assigned_data, in_place, data_in_place, copied, data_copied, interpolated, by_rows)
}
PLACES = ("before", "after")
TRAINED = (False, True)
"""Whether `requires_grad` is left as it is: nothing has a gradient of the second encoder anyway."""
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 4),
    "deep": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)),
    "normed": lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4, bias=False)),
    "repeated": lambda: nn.Sequential(nn.Linear(3, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))),
}
CASES = [*itertools.product(UPDATES, ENCODERS, PLACES, TRAINED)]


class Momentum(nn.Module):
    """Two encoders, the second of which follows the first."""

    def __init__(self, update: str, kind: str, place: str, trained: bool) -> None:
        super().__init__()
        self.online, self.update, self.place = ENCODERS[kind](), UPDATES[update], place
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.data.add_(0.1)
            p.requires_grad_(trained)
        self.calls = 0

    @torch.no_grad()
    def move(self) -> None:
        m = 1 - 0.2 * (math.cos(math.pi * self.calls / 8) + 1) / 2
        for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
            self.update(p, q, m)
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.online(x)
        if self.training and self.place == "before":
            self.move()
        with torch.no_grad():
            z = self.target(x)
        if self.training and self.place == "after":
            self.move()
        return y * z + y


@pytest.mark.parametrize(
    "case", [x if i % 16 == 0 else pytest.param(x, marks=pytest.mark.nightly) for i, x in enumerate(CASES[::3])]
)
def test_updated_parameters_are_state_over_steps_as_in_pytorch(case: tuple[str, str, str, bool]) -> None:
    torch.manual_seed(0)
    module = Momentum(*case)
    model = from_torch(module, batches()[0])
    updated = {name for name, _ in module.named_parameters() if name.startswith("target.")}
    assert {name for name in model.params if name.startswith("target")} == set()
    assert updated < set(model.state_names.to_torch(model.state))
    equal(model, module)


class Queue(nn.Module):
    """A queue of keys and its pointer, written and read at the pointer in one of the ways people do."""

    def __init__(self, pointer: str, axis: int) -> None:
        super().__init__()
        self.layer, self.pointer, self.axis = nn.Linear(3, 3), pointer, axis
        self.register_buffer("queue", torch.randn(8, 3) if axis == 0 else torch.randn(3, 8))
        self.register_buffer("labels", torch.arange(8))
        if pointer == "attribute":
            self.ptr: Any = 4
        else:
            self.register_buffer("ptr", torch.tensor([4]) if pointer != "scalar" else torch.tensor(4))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> Tensor:
        n = keys.shape[0]
        ptr = self.ptr if self.pointer == "attribute" else int(self.ptr) if self.pointer != "item" else self.ptr.item()
        if self.axis == 0:
            old = self.queue[ptr : ptr + n].clone()
            self.queue[ptr : ptr + n] = keys
        else:
            old = self.queue[:, ptr : ptr + n].T.clone()
            self.queue[:, ptr : ptr + n] = keys.T
        self.labels[ptr : ptr + n] = keys.argmax(1)
        ptr = (ptr + n) % 8
        if self.pointer == "attribute":
            self.ptr = ptr
        elif self.pointer == "scalar":
            self.ptr.fill_(ptr)
        else:
            self.ptr[0] = ptr
        return old

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        old = self.enqueue(y)
        queue = self.queue if self.axis == 0 else self.queue.T
        return (y @ queue.clone().detach().T) * (self.labels + 1) + (y * old).sum(1, keepdim=True)


QUEUES = [*itertools.product(("first", "scalar", "item", "attribute"), (0, 1))]


@pytest.mark.parametrize(("pointer", "axis"), QUEUES)
def test_a_queue_at_a_pointer_is_that_of_pytorch(pointer: str, axis: int) -> None:
    torch.manual_seed(0)
    module = Queue(pointer, axis)
    model = from_torch(module, batches()[0])
    assert {*model.state} == {"queue", "labels", "ptr"}
    equal(model, module)


def test_beyond_the_end_of_a_queue_it_is_nan() -> None:
    module = Queue("first", 0)
    model = from_torch(module, batches()[0])
    state = {**model.state, "ptr": np.array([6])}
    assert np.isnan(model(model.params, batches()[0], None, state)[0]).all()


def test_updated_parameters_are_saved_and_given_back(tmp_path: Any) -> None:
    torch.manual_seed(0)
    module = Momentum("in_place", "normed", "before", False)
    model = from_torch(module, batches()[0])
    step = jt.train_step(model.loss(lambda y, batch: jt.Loss.of(y**2)), jt.optim.sgd(0.0), precision="fp64")
    state = step.init(model.params, model_state=model.state)
    state, _ = step(state, batches()[0])
    module(torch.tensor(batches()[0]))
    back = model.to_torch(state.params, state.model_state)
    for name in ("target.0.weight", "target.1.running_mean", "online.0.weight", "calls"):
        np.testing.assert_allclose(at_path(back, name), at_path(module, name), rtol=1e-10)
    model.save(tmp_path / "saved")
    torch.manual_seed(0)
    equal(load_imported(tmp_path / "saved"), Momentum("in_place", "normed", "before", False))


def test_it_is_proved_beside_the_users_own_module() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    module = Momentum("assigned_data", "normed", "before", True)
    with jax.enable_x64(False):
        assert check(from_torch(module, batches()[0].astype(np.float32)).case(), steps=4).passed


def test_a_trained_parameter_that_forward_changes_is_refused_by_line() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(UserError, match=r"test_moved\.py:\d+: self\.weight\.clamp_"):
        from_torch(Clamped(3, 2), batches()[0])
