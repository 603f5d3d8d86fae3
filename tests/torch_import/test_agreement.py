"""What a module reads or decides while it is captured: right, or refused with the user's file and line."""

import itertools
import os
import random
import re
import sysconfig
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2Model
from transformers.utils import is_torchdynamo_compiling

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch

from random import random as bare_random  # isort: skip
from torch import manual_seed as bare_seed  # isort: skip
from torch.compiler import is_compiling as bare_is_compiling  # isort: skip

X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
RNG, PYTHON_RNG, SHARED = np.random.default_rng(5), random.Random(5), {"calls": 0}
TABLE = nn.Linear(3, 3)


def swallowed(x: torch.Tensor) -> float:
    try:
        return 1 / float(x.abs().max())
    except Exception:
        return 1.0


def swallowed_branch(x: torch.Tensor) -> float:
    try:
        if x.sum() > -1e9:
            return 3.0
    except Exception:
        pass
    return 2.0


def swallowed_numpy(x: torch.Tensor) -> float:
    try:
        return float(x.detach().numpy().std())
    except Exception:
        return 1.0


def reseeded() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(())


def bare_reseeded() -> torch.Tensor:
    bare_seed(0)
    return torch.rand(())


def forked() -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand(())


def called() -> int:
    SHARED["calls"] += 1
    return SHARED["calls"]


def kept(module: Any) -> torch.Tensor:
    if not hasattr(module, "drawn"):
        module.drawn = torch.rand(3)
    return module.drawn


def mixed() -> float:
    return float(np.random.beta(0.4, 0.4))


READ: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "numpy": lambda m, x: mixed(),
    "numpy_permutation": lambda m, x: torch.tensor(np.random.permutation(3)).float(),
    "numpy_seeded": lambda m, x: np.random.seed(0) or float(np.random.rand()),
    "numpy_new_generator": lambda m, x: np.random.default_rng().random(),
    "numpy_global_generator": lambda m, x: RNG.beta(0.4, 0.4),
    "numpy_coin": lambda m, x: 2.0 if RNG.random() < 0.5 else 3.0,
    "numpy_own_generator": lambda m, x: m.rng.random(),
    "numpy_legacy_generator": lambda m, x: m.legacy.rand(),
    "python": lambda m, x: random.gauss(0, 1),
    "python_bare": lambda m, x: bare_random(),
    "python_bare_coin": lambda m, x: 2.0 if bare_random() < 0.5 else 3.0,
    "python_sample": lambda m, x: float(random.sample(range(1000), 1)[0]),
    "python_global_object": lambda m, x: PYTHON_RNG.random(),
    "python_own_object": lambda m, x: m.python.choice([2.0, 3.0]),
    "python_closed_over": (lambda own: lambda m, x: own.uniform(1, 2))(random.Random(1)),
    "fake": lambda m, x: 2.0 if type(x) is not torch.Tensor else 3.0,
    "swallowed": lambda m, x: swallowed(x),
    "swallowed_branch": lambda m, x: swallowed_branch(x),
    "swallowed_numpy": lambda m, x: swallowed_numpy(x),
    "seed": lambda m, x: reseeded(),
    "bare_seed": lambda m, x: bare_reseeded(),
    "fork": lambda m, x: forked(),
    "time": lambda m, x: time.time() % 10,
    "clock": lambda m, x: time.perf_counter_ns() % 1000 / 100,
    "process": lambda m, x: int.from_bytes(os.urandom(2)) / 1000,
    "global_count": lambda m, x: float(called()),
    "global_module": lambda m, x: m.hidden(x),
    "attribute_count": lambda m, x: float(next(m.count)),
    "kept_random": lambda m, x: kept(m),
}

PLACES: dict[str, Callable[[torch.Tensor, Any, nn.Module], torch.Tensor]] = {
    "factor": lambda x, value, m: m.a(x) * value,
    "before": lambda x, value, m: m.b(F.gelu(m.a(x + value))),
    "branch": lambda x, value, m: m.a(x) if value is None else m.b(x) * value,
    "mask": lambda x, value, m: torch.where(m.b(x) > 0, m.a(x), 0.0) * value,
    "no_grad": lambda x, value, m: m.a(x) + scaled_without_gradient(x, value),
    "buffer": lambda x, value, m: m.a(x) + moved(m.mean, x, value),
}


def scaled_without_gradient(x: torch.Tensor, value: Any) -> torch.Tensor:
    with torch.no_grad():
        return x * value


def moved(mean: torch.Tensor, x: torch.Tensor, value: Any) -> torch.Tensor:
    mean.mul_(0.9).add_((x.detach() * value).mean(0))
    return torch.zeros(())


class Reading(nn.Module):
    """A module that uses what it reads in a place."""

    def __init__(self, read: str, place: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.rng, self.legacy, self.python = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.count, self.read, self.place = itertools.count(1), READ[read], PLACES[place]
        own = self.a
        self.hidden = lambda x: F.linear(x, own.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.place(x, self.read(self, x), self)


def cases() -> list[tuple[str, str]]:
    """Return each kind in a place, and each place with a kind."""
    return [(read, [*PLACES][i % len(PLACES)]) for i, read in enumerate(READ)]


@pytest.mark.parametrize(("read", "place"), cases())
def test_what_is_read_at_the_capture_is_right_or_refused_with_its_line(read: str, place: str) -> None:
    judged(read, place)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("clock", ["perf_counter", "time", "monotonic", "time_ns"])
def test_the_time_is_refused_where_rounding_is_as_large(clock: str, dtype: Any) -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x * (6e4 + getattr(time, clock)()))

    with jax.enable_x64(dtype == np.float64):
        for _ in range(4):
            with pytest.raises(UserError, match=r"test_agreement.py:\d+: return torch.sin\(x"):
                from_torch(Noise(), X.astype(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("read", READ)
def test_what_is_read_at_the_capture_is_right_or_refused_in_every_place(read: str, place: str) -> None:
    judged(read, place)


ASKED: dict[str, Callable[[], Any]] = {
    "compiling": lambda: torch.compiler.is_compiling(),
    "bare": lambda: bare_is_compiling(),
    "as_bool": lambda: bool(torch.compiler.is_compiling()),
    "equal": lambda: torch.compiler.is_compiling() == True,  # noqa: E712
    "joined": lambda: False | torch.compiler.is_exporting() | bare_is_compiling(),
    "exporting": lambda: torch.compiler.is_exporting(),
    "dynamo": lambda: torch._dynamo.is_compiling(),
    "jit_or_compiling": lambda: torch.jit.is_tracing() or torch.compiler.is_compiling(),
    "transformers": lambda: is_torchdynamo_compiling(),
}


@pytest.mark.parametrize("name", ASKED)
def test_forward_takes_the_path_that_it_takes_in_pytorch_whether_or_not_it_asks_for_compilation(name: str) -> None:
    class Shim(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if ASKED[name]() else y.clamp(-4, 4)

    module = Shim(3, 3)
    model = from_torch(module, X)
    params = {name: x.detach().numpy() for name, x in module.named_parameters()}
    outputs, _ = model(params, 100 * X, jax.random.key(0), model.state)
    np.testing.assert_allclose(outputs, module(torch.tensor(100 * X)).detach().numpy(), rtol=1e-5)
    assert torch.compiler.is_compiling() is False


def test_a_package_that_computes_something_else_while_it_is_compiled_is_refused() -> None:
    package: dict[str, Any] = {"torch": torch}
    code = "def scale():\n    return 2.0 if torch.compiler.is_compiling() else 3.0\n"
    exec(compile(code, f"{sysconfig.get_path('purelib')}/package.py", "exec"), package)

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * package["scale"]()

    with pytest.raises(UserError, match=r"is another one while forward is traced.*test_agreement.py:\d+: return"):
        from_torch(Scaled(3, 3), X)


def judged(read: str, place: str) -> None:
    torch.manual_seed(0)
    module = Reading(read, place)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    message = ""
    try:
        model = from_torch(module, X)
    except UserError as error:
        message = str(error)
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert all(x.requires_grad for x in module.parameters())
    if message:
        assert re.search(r"\(test_agreement\.py:\d+: .+\): ", message), message
        return
    # Imported: PyTorch computes the same, with other weights too.
    with torch.no_grad():
        module.a.weight.mul_(2)
    params = {name: x.detach().numpy() for name, x in module.named_parameters()}
    outputs, _ = model(params, X, jax.random.key(0), model.state)
    np.testing.assert_allclose(outputs, module(torch.tensor(X)).detach().numpy(), rtol=1e-5, atol=1e-6)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Attending(nn.Module):
    """Attention with a causal mask, one that is kept after the first call, dropout, a region without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.attention, self.mask = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), None

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.layer(x, src_mask=self.mask, is_causal=True)
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.1 * self.training)
        with torch.no_grad():
            norm = y.norm() + 1
        return self.attention(y / norm, x, x, key_padding_mask=keep)[0]


class Normalized(nn.Module):
    """Statistics in buffers of every kind, one that stays in evaluation, drops by chance, a check of finite numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3, padding=1))
        self.a, self.b = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)
        self.c, self.frozen = nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(()))
        self.rate = 0.0

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if not torch.isfinite(x).all() or (random.uniform(0, 1) < self.rate and self.training):
            x = x * 0
        x = F.dropout1d(self.frozen(self.c(self.b(self.a(x)))), 0.3, self.training)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return F.rrelu(x, training=self.training) + (F.gumbel_softmax(x, dim=1) if self.training else x.softmax(1))


class Recurrent(nn.Module):
    """Padded sequences, a checkpoint, gradients of its own and sparse ones, a loss over lengths, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(7, 4), nn.LSTM(4, 4, 2, dropout=0.2, batch_first=True)
        self.head, self.ends = nn.Linear(4, 7), nn.Embedding(6, 4, sparse=True)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(self.table(ids) + self.ends(lengths)[:, None], lengths, True, False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], True)
        y = torch.utils.checkpoint.checkpoint(self.head, Doubled.apply(y), use_reentrant=False)
        loss = F.ctc_loss(y.log_softmax(-1).transpose(0, 1), ids[:, :2].clamp(1), lengths, torch.tensor([2, 2, 2]))
        return {"loss": loss, "best": y.argmax(-1), "count": 3}


CLEAN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "attending": (Attending, lambda: (torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))),
    "normalized": (Normalized, lambda: torch.randn(4, 3, 6)),
    "recurrent": (Recurrent, lambda: (torch.randint(0, 7, (3, 5)), torch.tensor([3, 5, 4]))),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_modules_are_imported_and_left_as_they_were(name: str) -> None:
    torch.manual_seed(0)
    make, batch = CLEAN[name]
    module, example = make(), batch()
    attributes = {path: {**vars(part)} for path, part in module.named_modules()}
    before = {key: x.clone() for key, x in module.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    model = from_torch(module, example)
    model(model.params, jax.tree.map(lambda x: x.numpy(), example), None, model.state)
    for path, part in module.named_modules():
        assert vars(part).keys() == attributes[path].keys()
        assert all(value is attributes[path][key] for key, value in vars(part).items())
    assert all(torch.equal(x, before[key]) for key, x in module.state_dict().items())
    assert (states[0], states[1]) == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[2], torch.get_rng_state())


@pytest.mark.parametrize("seed", range(2))
def test_a_random_network_is_imported(seed: int) -> None:
    draw = random.Random(seed)
    layers = [
        *(lambda: nn.Dropout(0.3), lambda: nn.BatchNorm1d(6), lambda: nn.LayerNorm(6), nn.GELU, nn.Softplus),
        *(lambda: nn.Linear(6, 6), lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.AlphaDropout),
    ]
    network = nn.Sequential(*(draw.choice(layers)() for _ in range(8)))
    model = from_torch(network, np.ones((4, 6), np.float32))
    model(model.params, np.ones((4, 6), np.float32), None, model.state)


def test_a_float64_module_is_compared_in_float64() -> None:
    with jax.enable_x64():
        from_torch(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3)).double(), X.astype(np.float64))
        with pytest.raises(UserError, match="would be drawn from once"):
            from_torch(Reading("python_own_object", "factor").double(), X.astype(np.float64))


def test_a_first_call_that_is_another_one_is_refused() -> None:
    class Started(nn.Linear):
        started = False

        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.started:
                self.mean.copy_(x.mean(0) * 2)
                self.started = True
            return super().forward(x - self.mean)

    with pytest.raises(UserError, match=r"is another one than PyTorch's.*\(test_agreement"):
        from_torch(Started(), X)


def test_a_hook_on_a_tensor_is_refused() -> None:
    class Hooked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            y.register_hook(lambda grad: grad * 0.1)
            return y

    with pytest.raises(
        UserError, match=r"register_hook inside forward.*\(test_agreement.py:\d+: y.register_hook"
    ) as info:
        from_torch(Hooked(3, 3), X)
    assert not [frame.path for frame in info.traceback if "torch/export" in str(frame.path)]


def test_a_model_that_returns_a_cache_is_told_to_use_none() -> None:
    model = GPT2Model(
        GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=8, n_positions=4, bos_token_id=0, eos_token_id=0)
    )
    ids = np.zeros((2, 3), np.int64)
    with pytest.raises(UserError, match=r"returns a DynamicCache: set config\.use_cache = False"):
        from_torch(model, ids)
    model.config.use_cache = False
    from_torch(model, ids)


def test_another_gradient_than_pytorchs_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return Doubled.apply(y) if type(y) is torch.Tensor else y.round()

    with pytest.raises(UserError, match=r"the gradient of '(weight|bias)' is another one"):
        from_torch(Scaled(3, 3), X)


def test_an_example_that_the_module_rejects_is_refused() -> None:
    class Checked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor and x.min() < 0:
                raise ValueError("negative numbers")
            return super().forward(x)

    with pytest.raises(UserError, match=r"Checked raises ValueError: negative numbers on the example.*test_agreement"):
        from_torch(Checked(3, 3), X)
    from_torch(Checked(3, 3), np.abs(X))


def test_two_rows_of_a_large_example_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    class Wide(nn.Linear):
        drawn = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:
                print(len(x))  # everything else is set back
            return super().forward(x) * (random.random() if self.drawn else 1)

    module, x = Wide(64, 2), np.ones((128, 64), np.float32)
    model = from_torch(module, x)
    assert model(model.params, x)[0].shape == (128, 2)
    assert set(capsys.readouterr().out.split()) == {"2"}
    module.drawn = True
    with pytest.raises(UserError, match=r"random\.random would be drawn once"):
        from_torch(module, x)
