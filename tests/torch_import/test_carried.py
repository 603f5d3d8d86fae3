"""Attributes that `forward` carries from call to call, over steps of training, beside PyTorch in float64."""

import math
import random
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import ImportedModel, from_torch, load_imported
from parity import check
from tests.torch_import.judge import at_path
from tests.torch_import.steps import batches, equal, in_float64

Pair = namedtuple("Pair", ["h", "c"])


class Kind(NamedTuple):
    """A way to carry something: the attributes at the start, and what a call computes of the module and y."""

    start: Callable[[], dict[str, Any]]
    call: Callable[[Any, Tensor], Any]


def hidden(m: Any, y: Tensor) -> Tensor:
    h = torch.tanh(y.mean(0) + 0.5 * m.h)
    m.h = h.detach()
    return h


def in_place(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.total.mul_(0.9).add_(y.mean(0))
    return m.total.clone()


def of_two_kinds(m: Any, y: Tensor) -> Tensor:
    m.pair = tuple(torch.tanh(y.mean(0) + x).detach() for x in m.pair)
    return m.pair[0] * m.pair[1]


def of_a_dict(m: Any, y: Tensor) -> Tensor:
    m.cache = {"h": y.detach()[0] + m.cache["h"] * 0.5, "n": m.cache["n"] + 1}
    return m.cache["h"] / m.cache["n"]


def of_a_list(m: Any, y: Tensor) -> Tensor:
    m.states[1] = m.states[0] * 0.5
    m.states[0] = y.detach().mean(0)
    return m.states[1] + m.states[0]


def of_a_named_tuple(m: Any, y: Tensor) -> Tensor:
    m.lstm = Pair((m.lstm.h + y.mean(0)).detach(), m.lstm.c * 0.9 + 0.1)
    return m.lstm.h * m.lstm.c


def of_a_deque(m: Any, y: Tensor) -> Tensor:
    m.recent.append(y.detach().mean(0))
    return torch.stack(list(m.recent)).mean(0)


def of_a_list_in_place(m: Any, y: Tensor) -> Tensor:
    for i, x in enumerate(m.sums):
        x.mul_(0.5).add_(y.detach().mean(0), alpha=i + 1)
    return m.sums[0] * m.sums[1]


def filled(m: Any, y: Tensor) -> Tensor:
    m.calls += 1
    return y + torch.full((3,), float(m.calls)) * torch.tensor(m.calls, dtype=y.dtype)


def changed_places(m: Any, y: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a + y.detach().mean(0)
    return m.a - 2 * m.b


def previous(m: Any, y: Tensor) -> Tensor:
    difference = y - m.last
    m.last = y.detach()
    return difference


def counted(m: Any, y: Tensor) -> Tensor:
    m.steps += 1
    return y * (m.steps / 7)


def counted_before(m: Any, y: Tensor) -> Tensor:
    i = m.i
    m.i += 1
    return y * i + m.i


def annealed(m: Any, y: Tensor) -> Tensor:
    m.step = m.step + 1
    return y / max(0.5, math.exp(-0.3 * m.step))


def warmed_up(m: Any, y: Tensor) -> Tensor:
    weight = min(1.0, m.n / 3)
    m.n += 1
    return y * weight - (1 - weight) * y**2


def corrected(m: Any, y: Tensor) -> Tensor:
    m.k += 1
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)
    return m.mean / (1 - 0.9**m.k)


def cosine(m: Any, y: Tensor) -> Tensor:
    rate = 0.5 * (1 + math.cos(math.pi * (m.t % 5) / 5))
    m.t += 1
    return y * rate


def decaying(m: Any, y: Tensor) -> Tensor:
    m.tau *= 0.9
    return y * m.tau + (y > m.tau).to(y.dtype)


def number_then_tensor(m: Any, y: Tensor) -> Tensor:
    m.ema = 0.9 * m.ema + 0.1 * y.detach().mean()
    return y - m.ema


def item(m: Any, y: Tensor) -> Tensor:
    m.loss = 0.9 * m.loss + 0.1 * (y**2).mean().item()
    return y / (m.loss + 1)


def turning(m: Any, y: Tensor) -> Tensor:
    m.turn = (m.turn + 1) % 3
    return y * m.turn + m.turn // 2 - abs(m.turn - 1) + round(m.turn / 2)


def arithmetic(m: Any, y: Tensor) -> Tensor:
    n = m.number
    m.number = n - 3
    return y * (-n // 2 + n % -4 + 7 // (n * n + 1)) + n**3 - (n - 0.5) / 2 + (5 - n)


def powers(m: Any, y: Tensor) -> Tensor:
    m.power += 1
    of_tensors = (m.power + 1) ** y + (m.power + 0.5) ** y - torch.cosh(y) ** m.power
    return of_tensors + y * m.power**2 - 2.0**m.power + (m.power + 1) ** -1 + 2**m.power


def rows_at_a_place(m: Any, y: Tensor) -> Tensor:
    start, end = m.place + 1, m.place + 4 - 1
    rows = m.queue[start:end] + m.queue[m.place]
    m.place = (m.place + 2) % 6
    return y * rows.sum(0)


def of_a_part(m: Any, y: Tensor) -> Tensor:
    m.part.seen = m.part.seen + y.detach().abs().amax(0)
    return y / m.part.seen


def integers(m: Any, y: Tensor) -> Tensor:
    m.best = torch.where(y.detach().amax(0) > m.best, m.best + 1, m.best)
    return y * m.best


def statistics(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.center = 0.5 * m.center + 0.5 * y.detach().mean(0)
        return y - y.mean(0)
    return y - m.center


def part() -> nn.Module:
    made = nn.Identity()
    made.seen = torch.ones(3)
    return made


KINDS: dict[str, Kind] = {
    "hidden": Kind(lambda: {"h": torch.zeros(3)}, hidden),
    "in_place": Kind(lambda: {"total": torch.ones(3)}, in_place),
    "pair": Kind(lambda: {"pair": (torch.zeros(3), torch.ones(3))}, of_two_kinds),
    "dict": Kind(lambda: {"cache": {"h": torch.zeros(3), "n": 1}}, of_a_dict),
    "list": Kind(lambda: {"states": [torch.zeros(3), torch.ones(3)]}, of_a_list),
    "named_tuple": Kind(lambda: {"lstm": Pair(torch.zeros(3), torch.ones(3))}, of_a_named_tuple),
    "deque": Kind(lambda: {"recent": deque([torch.zeros(3), torch.ones(3)], maxlen=2)}, of_a_deque),
    "list_in_place": Kind(lambda: {"sums": [torch.zeros(3), torch.ones(3)]}, of_a_list_in_place),
    "filled": Kind(lambda: {"calls": 0}, filled),
    "changed_places": Kind(lambda: {"a": torch.zeros(3), "b": torch.ones(3)}, changed_places),
    "previous": Kind(lambda: {"last": torch.zeros(4, 3)}, previous),
    "counted": Kind(lambda: {"steps": 0}, counted),
    "counted_before": Kind(lambda: {"i": 2}, counted_before),
    "annealed": Kind(lambda: {"step": 0}, annealed),
    "warmed_up": Kind(lambda: {"n": 0}, warmed_up),
    "corrected": Kind(lambda: {"k": 0, "mean": torch.zeros(3)}, corrected),
    "cosine": Kind(lambda: {"t": 0}, cosine),
    "decaying": Kind(lambda: {"tau": 1.0}, decaying),
    "number_then_tensor": Kind(lambda: {"ema": 0.0}, number_then_tensor),
    "item": Kind(lambda: {"loss": 0.0}, item),
    "turning": Kind(lambda: {"turn": 0}, turning),
    "arithmetic": Kind(lambda: {"number": 4}, arithmetic),
    "powers": Kind(lambda: {"power": 0}, powers),
    "rows_at_a_place": Kind(lambda: {"place": 0, "queue": torch.arange(24.0).view(8, 3)}, rows_at_a_place),
    "part": Kind(lambda: {"part": part()}, of_a_part),
    "integers": Kind(lambda: {"best": torch.zeros(3, dtype=torch.long)}, integers),
    "statistics": Kind(lambda: {"center": torch.zeros(3)}, statistics),
}


class Carrying(nn.Module):
    """A layer, and what it carries in several ways."""

    def __init__(self, *kinds: Kind) -> None:
        super().__init__()
        self.layer, self.kinds = nn.Linear(3, 3), kinds
        for kind in kinds:
            for name, value in kind.start().items():
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.stack([y, *(kind.call(self, y).expand(y.shape) for kind in self.kinds)])


def made(*names: str) -> nn.Module:
    torch.manual_seed(0)
    return Carrying(*(KINDS[name] for name in names))


pytestmark = pytest.mark.usefixtures(in_float64.__name__)


def imported(module: nn.Module) -> ImportedModel:
    before = {name: repr(x) for name, x in vars(module).items() if name != "training"}
    model = from_torch(module, batches()[0])
    assert before == {name: repr(x) for name, x in vars(module).items() if name != "training"}
    return model


def chosen(seed: int, count: int = 3) -> list[str]:
    """Return some kinds; the first seeds have each kind once."""
    names = [*KINDS]
    random.Random(seed // (len(names) // count)).shuffle(names)
    place = seed % (len(names) // count) * count
    return names[place : place + count]


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(i, marks=pytest.mark.nightly) for i in range(9, 80))])
def test_attributes_are_state_over_steps_as_in_pytorch(seed: int) -> None:
    module = made(*chosen(seed))
    equal(imported(module), module)


def test_state_is_saved_and_given_back(tmp_path: Any) -> None:
    module = made("hidden", "counted", "dict", "named_tuple", "statistics")
    model = imported(module)
    assert {*model.state} == {"h", "steps", "cache.h", "cache.n", "lstm.h", "lstm.c", "center"}
    _, state = model(model.params, batches()[1], jax.random.key(0), model.state)
    back = model.to_torch(model.params, state)
    module(torch.tensor(batches()[1]))
    assert back.steps == module.steps == 1
    assert type(back.steps) is int
    assert type(back.lstm) is Pair
    for name in state:
        np.testing.assert_allclose(at_path(back, name), at_path(module, name), rtol=1e-12)
    model.save(tmp_path / "saved")
    equal(load_imported(tmp_path / "saved"), made("hidden", "counted", "dict", "named_tuple", "statistics"))


def test_a_step_carries_the_state() -> None:
    module = made("hidden", "counted")
    model = imported(module)
    step = jt.train_step(model.loss(lambda y, batch: jt.Loss.of(y**2)), jt.optim.sgd(0.0), precision="fp64")
    state = step.init(model.params, model_state=model.state)
    for x in batches()[:3]:
        state, _ = step(state, x)
        module(torch.tensor(x))
    assert int(state.model_state["steps"]) == module.steps == 3
    np.testing.assert_allclose(state.model_state["h"], module.h, rtol=1e-10)


def test_it_is_proved_beside_the_users_own_module() -> None:
    torch.set_default_dtype(torch.float32)
    with jax.enable_x64(False):
        module = made("hidden", "annealed", "pair", "statistics", "in_place")
        model = from_torch(module, batches()[0].astype(np.float32))
        assert check(model.case(), steps=4).passed


def read_never(m: Any, y: Tensor) -> Tensor:
    m.calls += 1
    m.last = y.detach()
    if m.calls % 100 == 0:
        print(f"{m.calls} calls")
    return y


def test_what_nothing_depends_on_is_left_out() -> None:
    torch.manual_seed(0)
    module = Carrying(Kind(lambda: {"calls": 0, "last": torch.zeros(4, 3)}, read_never), KINDS["hidden"])
    model = imported(module)
    assert [*model.state] == ["h"]
    assert {*model.left_out} == {"calls", "last"}
    equal(model, module)


def read_in_evaluation(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.seen = y.detach()
    return y if m.training else y - m.seen


def test_what_evaluation_alone_reads_is_state() -> None:
    torch.manual_seed(0)
    module = Carrying(Kind(lambda: {"seen": torch.ones(4, 3)}, read_in_evaluation))
    model = imported(module)
    x, other = batches()[:2]
    _, state = model(model.params, x, jax.random.key(0), model.state)
    module(torch.tensor(x))
    expected = module.eval()(torch.tensor(other)).detach()
    np.testing.assert_allclose(model(model.params, other, None, state)[0], expected, rtol=1e-12, atol=1e-12)


def undetached(m: Any, y: Tensor) -> Tensor:
    m.h = torch.tanh(y.mean(0) + m.h)
    return m.h


def started_by_the_first_call(m: Any, y: Tensor) -> Tensor:
    m.h = y.detach().mean(0) if m.h is None else 0.5 * m.h + y.detach().mean(0)
    return y - m.h


def growing(m: Any, y: Tensor) -> Tensor:
    m.h = torch.cat([m.h, y.detach()])[-8:]
    return y - m.h.mean(0)


def of_the_weight(m: Any, y: Tensor) -> Tensor:
    change = (m.layer.weight - m.h).sum()
    m.h = m.layer.weight.detach()
    return y + change


def appended(m: Any, y: Tensor) -> Tensor:
    m.h.append(y.detach().mean(0))
    return y - sum(m.h)


REFUSED: dict[str, tuple[Kind, str]] = {
    "undetached": (Kind(lambda: {"h": torch.zeros(3)}, undetached), r"with its gradient.*: assign its values alone"),
    "none": (Kind(lambda: {"h": None}, started_by_the_first_call), "call the module once before the import"),
    "growing": (Kind(lambda: {"h": torch.zeros(4, 3)}, growing), "register it as a buffer"),
    "weight": (Kind(lambda: {"h": torch.zeros(3, 3)}, of_the_weight), "in the memory of 'layer.weight'"),
    "appended": (Kind(lambda: {"h": []}, appended), "register it as a buffer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_by_line(name: str) -> None:
    kind, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        from_torch(Carrying(kind), batches()[0])
    assert "'h'" in str(error.value)


def test_a_module_that_was_called_once_starts_there() -> None:
    torch.manual_seed(0)
    module = Carrying(REFUSED["none"][0])
    module(torch.tensor(batches()[0]))
    equal(imported(module), module)


class Reporting(nn.Module):
    """Returns the numbers that it counts beside tensors, as a dict for a log has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.step += 1
        beta = min(1.0, self.step / 3)
        return {"y": self.layer(x) * beta, "log": (beta, {"step": self.step}), "rows": 4}


def test_numbers_that_are_returned_are_arrays() -> None:
    torch.manual_seed(0)
    module = Reporting()
    model = imported(module)
    state = model.state
    for x in batches():
        ours, state = model(model.params, x, jax.random.key(0), state)
        theirs = module(torch.tensor(x))
        np.testing.assert_allclose(ours["y"], theirs["y"].detach(), rtol=1e-12)
        assert float(ours["log"][0]) == theirs["log"][0]
        assert int(ours["log"][1]["step"]) == theirs["log"][1]["step"]
        assert ours["rows"] == 4


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.rows: Tensor
        self.register_buffer("rows", torch.zeros(8, 3))
        self.place: Tensor
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        place = int(self.place)
        self.rows[place : place + 4] = x.detach()
        self.place[0] = (place + 4) % 8
        return self.linear(x) @ self.rows.T


def test_an_import_leaves_pytorch_as_it_is() -> None:
    model = from_torch(Queue(), np.ones((4, 3)))
    assert not model.assumptions
    n = torch.arange(3)
    # Fails once a class of tensors has had a `__getitem__` of its own.
    assert torch.tensor([n[1], n[2]]).tolist() == [1, 2]
    assert torch.tensor([[n[1]], [n[2]]]).tolist() == [[1], [2]]
