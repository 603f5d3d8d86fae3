"""`model.case`, and the commands of parity on a function that returns a module and an example batch."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn
from torch.nn import functional as F

import jaxtrain as jt
from jaxtrain import cases, optim
from parity import check
from parity.bundle import record
from parity.cases.example_batches import Example
from parity.cli import main
from parity.explain.locate import locate
from parity.optimizer import ADAM_MOMENTS, Optimizer
from tests.torch_import import bare

FILE = str(Path(bare.__file__))


def test_batches_are_like_the_example() -> None:
    labels = np.array([[5, -100], [9, 7]])
    given = {"mask": np.array([[1, 0], [1, 1]]), "labels": labels, "x": np.ones((2, 3)), "p": np.array([[0.5], [1]])}
    example = Example(given)
    batches = [example.batch(seed, 4) for seed in range(9)]
    for batch in batches:
        assert {name: x.shape for name, x in batch.items()} == {
            "mask": (4, 2),
            "labels": (4, 2),
            "x": (4, 3),
            "p": (4, 1),
        }
        assert sorted(batch["mask"].tolist()) == [[1, 0], [1, 0], [1, 1], [1, 1]]
        assert batch["labels"][::2, 1].tolist() == [-100, -100]
        assert {*batch["labels"].flat} <= {-100, *range(10)}
        assert batch["x"].dtype == batch["p"].dtype == np.float32
        assert 0.5 <= batch["p"].min() <= batch["p"].max() <= 1
    assert len({batch["labels"].tobytes() for batch in batches}) > 1
    np.testing.assert_array_equal(example.batch(3, 4)["x"], batches[3]["x"])


def test_a_case_without_parity_is_refused_in_one_line(monkeypatch) -> None:
    monkeypatch.setattr(cases, "_PROVIDED", [])
    model = jt.from_torch(nn.Linear(3, 2), np.ones((4, 3), np.float32))
    with pytest.raises(jt.UserError, match=r"import parity before model\.case\(\)"):
        model.case()


def test_arrays_without_common_rows_are_one_row() -> None:
    ids, hidden = Example((np.ones((6, 2), np.int64), np.zeros((1, 2, 5)))), np.zeros((1, 2, 5))
    assert ids.rows is None
    batch = ids.batch(0, 1)
    assert [x.shape for x in ids.in_jax(batch)] == [(6, 2), hidden.shape]
    with pytest.raises(jt.UserError, match="'input' is complex"):
        Example(np.ones(3, complex))


@pytest.mark.parametrize("name", ["net", "recurrent", "with_loss"])
def test_a_bare_module_is_proved(name, capsys) -> None:
    spec = f"{FILE}::{name}"
    assert main(["run", spec, "--precision", "fp64", "--steps", "3"]) == 0, capsys.readouterr()
    assert main(["prove", spec]) == 0
    printed = capsys.readouterr().out
    assert f"{name} fp64 held" in printed
    assert "not proven" not in printed
    if name == "net":
        assert "7 tensors and 6 buffers of PyTorch" in printed


def test_a_wrong_operation_is_found_at_its_line(capsys) -> None:
    assert main(["mutate", f"{FILE}::with_loss"]) == 0
    printed = capsys.readouterr().out
    assert "aten.linear.default: gradient caught, located" in printed
    assert "aten.cross_entropy_loss.default: values caught, located" in printed
    assert "misplaced" not in printed
    assert "4 of 4 caught, 0 false alarms" in printed


def test_an_error_of_the_import_names_the_line(capsys) -> None:
    assert main(["run", f"{FILE}::sized"]) == 2
    printed = capsys.readouterr().err
    assert "parity: a Python number depends on floating-point values" in printed
    assert "bare.py:" in printed
    assert "return x[: int(x.sum() * 1000)]" in printed
    assert main(["mutate", f"{FILE}::Sized"]) == 2
    assert "'Sized' in" in capsys.readouterr().err


def test_a_case_with_a_loss_and_batches_of_ones_own() -> None:
    model = jt.from_torch(*bare.linear())

    def batch(seed, rows):
        rng = np.random.default_rng(seed)
        return {"input": rng.standard_normal((rows, 3)).astype(np.float32), "y": rng.standard_normal((rows, 2))}

    def torch_loss(module, batch):
        return ((module(batch["input"]) - batch["y"]) ** 2).sum(), len(batch["y"])

    def loss_fn(factor):
        def loss(params, batch, rng):
            return jt.Loss(
                factor * ((model(params, batch["input"], rng)[0] - batch["y"]) ** 2).sum(), len(batch["y"])
            ), {}

        return loss

    assert check(model.case("own", torch_loss, loss_fn(1), batch=batch, rows=4), steps=2).passed
    assert not check(model.case("own", torch_loss, loss_fn(1.001), batch=batch, rows=4), steps=2).passed
    with pytest.raises(jt.UserError, match="pass both"):
        model.case("own", torch_loss)
    with pytest.raises(jt.UserError, match="pass rows="):
        model.case(batch=batch)


def test_a_model_becomes_a_module_with_its_weights() -> None:
    module, batch = bare.net()
    model = jt.from_torch(module.to(torch.bfloat16).eval(), jax.tree.map(np.asarray, batch))
    made = model.to_torch()
    assert not made.training
    for ours, theirs in zip(made.state_dict().items(), module.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    zero = model.to_torch({name: np.zeros(x.shape) for name, x in model.params.items()})
    assert not zero.head.weight.any()
    assert [p.requires_grad for p in zero.parameters()] == [p.requires_grad for p in module.parameters()]
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    model = jt.from_torch(empty, np.ones((1, 3), np.float32))
    with pytest.raises(jt.UserError, match="has no weights"):
        model.to_torch()


class OneShape(nn.Module):
    """A module whose parameters are all matrices, or all vectors, and which multiplies by a complex buffer."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 12).reshape(shape))
        self.register_buffer("turns", torch.polar(torch.ones(6), torch.linspace(0.1, 3, 6)))

    def forward(self, x):
        turned = torch.view_as_complex((x * self.w.reshape(12)).reshape(-1, 6, 2)) * self.turns
        return torch.view_as_real(turned).flatten(1)


@pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=["vectors", "matrices"])
def test_a_module_with_one_parameter_group_and_a_complex_buffer_is_proved(shape) -> None:
    model = jt.from_torch(OneShape(*shape), np.ones((4, 12), np.float32))
    verdict = check(model.case(), steps=2)
    assert verdict.passed, verdict.lines


class FourierOperator(nn.Module):
    """A layer of a Fourier neural operator, whose weights of low and high frequencies are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.project = nn.Conv2d(1, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 1, 1)
        self.low, self.high = (nn.Parameter(torch.randn(3, 3, 2, 2, dtype=torch.complex64) / 3) for _ in range(2))

    def forward(self, x):
        x = self.lift(x)
        modes = torch.fft.rfft2(x)
        out = torch.zeros_like(modes)
        out[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", modes[:, :, :2, :2], self.low)
        out[:, :, -2:, :2] = torch.einsum("bixy,ioxy->boxy", modes[:, :, -2:, :2], self.high)
        return self.project(F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.skip(x)))


@pytest.fixture(scope="module")
def operator():
    torch.manual_seed(0)
    return jt.from_torch(FourierOperator(), np.random.default_rng(0).standard_normal((4, 1, 8, 6)).astype(np.float32))


ADAM = Optimizer("Adam", lambda named: torch.optim.Adam(named, 1e-2), optim.adam(1e-2), ADAM_MOMENTS)
SGD = Optimizer(
    "SGD",
    lambda named: torch.optim.SGD(named, 0.1, momentum=0.9),
    optim.sgd(0.1, 0.9),
    {"momentum_buffer": "momentum_buffer"},
)


@pytest.mark.parametrize(("optimizer", "clip_norm"), [(ADAM, None), (SGD, 0.9)], ids=["adam", "sgd, clipped"])
def test_a_module_with_complex_parameters_is_proved(operator, optimizer, clip_norm) -> None:
    case = operator.case(optimizer=optimizer, clip_norm=clip_norm)
    for precision, accumulate in (("fp64", 2), ("fp32", 1), ("bf16", 1)):
        verdict = check(case, precision, steps=4, accumulate=accumulate)
        assert verdict.passed, (precision, verdict.lines)
    assert locate(case) is None


@pytest.mark.parametrize(
    ("change", "fault", "stage", "located"),
    [
        # The value is that of `w`, and the gradient the conjugate of PyTorch's.
        (lambda w: lax.complex(w.real, 2 * lax.stop_gradient(w.imag) - w.imag), "gradient, low", "gradients", ""),
        (lambda w: lax.complex(w.real, w.imag * (1 + 1e-7)), "first loss", "loss", "FourierOperator: aten.bmm"),
    ],
    ids=["conjugated gradient", "wrong imaginary part"],
)
def test_a_wrong_complex_parameter_is_caught(operator, change, fault, stage, located) -> None:
    def torch_loss(module, batch):
        return ((module(batch["input"]) - 1) ** 2).sum(), len(batch["input"])

    def loss_fn(params, batch, rng):
        outputs, _ = operator({**params, "low": change(params["low"])}, batch["input"], rng)
        return jt.Loss(((outputs - 1) ** 2).sum(), len(batch["input"])), {}

    verdict = check(operator.case(torch_loss=torch_loss, loss_fn=loss_fn), steps=2, locate=True)
    assert verdict.faults[0].startswith(fault), verdict.lines
    assert verdict.stage.startswith(f"{stage}: ")
    assert verdict.first_divergence.torch.startswith(located)


def test_a_wrong_optimizer_of_complex_parameters_is_diagnosed(operator) -> None:
    wrong = dataclasses.replace(ADAM, jax=optim.adam(1e-2, eps=1e-6))
    verdict = check(operator.case(optimizer=wrong, clip_norm=None), steps=1, locate=True)
    assert verdict.diagnosis.startswith("Adam: JAX's eps is 1e-6: eps=1e-8"), verdict.lines


def test_what_cannot_be_compared_of_complex_parameters_is_refused_in_one_line(operator, tmp_path) -> None:
    case = operator.case()
    with pytest.raises(jt.UserError, match=r"low is complex, .* GradScaler does not unscale: use fp64"):
        check(case, "fp16", steps=1)
    with pytest.raises(jt.UserError, match="complex, which a bundle of safetensors does not support"):
        record(case, ["fp64"], tmp_path / "bundle", steps=1)


@pytest.mark.parametrize("precision", ["bf16_params_stochastic", "bf16_params_kahan"])
def test_complex_parameters_are_not_rounded_to_bfloat16(precision) -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(6, 16, bias=False)
            self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))

        def forward(self, x):
            x = self.lift(x)
            x = x.float() if x.dtype == torch.bfloat16 else x  # PyTorch has no transform of bfloat16
            return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=16)

    torch.manual_seed(0)
    case = jt.from_torch(Filter(), np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)).case()
    verdict = check(case, precision, steps=3)
    assert verdict.passed, verdict.lines


def test_gradients_that_pytorch_conjugates_when_they_are_read_are_compared() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) + self.w.conj(), n=8)

    # PyTorch's clipping and AdamW refuse such a gradient.
    case = jt.from_torch(Added(), np.ones((3, 8), np.float32)).case(optimizer=SGD, clip_norm=None)
    verdict = check(case, steps=2)
    assert verdict.passed, verdict.lines
    assert locate(case) is None
