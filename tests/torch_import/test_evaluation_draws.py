"""Random numbers in evaluation: drawn with a key, refused without one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Beta, Binomial, Dirichlet, Gamma, StudentT
from torch.nn import functional as F

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from tests.torch_import.reference import Function, batch_of

Tensor = torch.Tensor
GENERATOR = torch.Generator()
X = np.abs(batch_of(6, 3)).astype(np.float32)
ALWAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda self, x: F.dropout(x, 0.5, training=True),
    "feature dropout": lambda self, x: F.dropout1d(x[:, :, None], 0.5, training=True)[..., 0],
    "attention": lambda self, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "rand": lambda self, x: x + torch.rand(3),
    "randn_like": lambda self, x: x + torch.randn_like(x),
    "bernoulli": lambda self, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randperm": lambda self, x: x[torch.randperm(6)],
    "randint": lambda self, x: x + torch.randint(0, 1000, (3,)),
    "rrelu": lambda self, x: F.rrelu(-x, training=True),
    "normal": lambda self, x: torch.normal(x, 1.0),
    "multinomial": lambda self, x: x + torch.multinomial(x, 1),
    "gumbel_softmax": lambda self, x: F.gumbel_softmax(x, dim=-1),
    "own generator": lambda self, x: x + torch.rand(3, generator=self.generator),
    "another's generator": lambda self, x: x + torch.empty_like(x).normal_(generator=GENERATOR),
    "beta": lambda self, x: x * Beta(0.4, torch.tensor(0.4)).sample(),
    "dirichlet": lambda self, x: x + Dirichlet(torch.ones(3)).sample((2,)).sum(0),
    "gamma": lambda self, x: x * Gamma(x + 1, 2.0).rsample(),
    "student": lambda self, x: x + StudentT(torch.tensor(3.0)).sample((3,)),
    "poisson": lambda self, x: x + torch.poisson(100 * x),
    "binomial": lambda self, x: x + Binomial(1000, torch.tensor(0.5)).sample((3,)),
    "rnn": lambda self, x: self.rnn.train()(x[None])[0][0] * 100,
}
NEVER: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "off": lambda self, x: F.dropout(x, 0.5, training=False),
    "rate of 0": lambda self, x: F.dropout(x, 0.0, training=True),
    "mode": lambda self, x: F.dropout(x, 0.5, training=self.training),
    "attention": lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training),
    "rrelu": lambda self, x: F.rrelu(-x, training=self.training),
    "rnn": lambda self, x: self.rnn(x[None])[0][0],
    "unused": lambda self, x: x + 0 * len(torch.rand(3)),
}


def imported(fn: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, jt.ImportedModel]:
    torch.manual_seed(0)
    module = Function(lambda self, x: fn(self, x) * self.w, rnn=nn.LSTM(3, 3, 2, dropout=0.5, batch_first=True)).float()
    module.generator = torch.Generator()
    return module, from_torch(module, X)


@pytest.mark.parametrize("name", ALWAYS)
def test_evaluation_that_draws_takes_a_key(name: str) -> None:
    _, model = imported(ALWAYS[name])
    with pytest.raises(UserError, match=r"draws random numbers in evaluation \(.*test_evaluation_draws.py:\d+: .*key"):
        model(model.params, X)
    run = jax.jit(lambda key: model(model.params, X, key, train=False)[0])
    first, again, other = (np.asarray(run(jax.random.key(i))) for i in (0, 0, 1))
    assert np.isfinite(first).all()
    assert (first == again).all()
    assert (first != other).any()


def test_evaluation_without_draws_needs_no_key() -> None:
    for fn in NEVER.values():
        module, model = imported(fn)
        expected = module.eval()(torch.tensor(X)).detach().numpy()
        found = [model(model.params, X)[0], model(model.params, X, jax.random.key(0), train=False)[0]]
        for outputs in found:
            np.testing.assert_allclose(outputs, expected, rtol=1e-5)


def test_dropout_in_evaluation_has_the_rate_and_the_scale() -> None:
    module = Function(lambda self, x: F.dropout(x, 0.25, training=True) * self.w).float()
    x = np.ones((4000, 3), np.float32)
    outputs, _ = from_torch(module, x)({"w": np.ones(3, np.float32)}, x, jax.random.key(0), train=False)
    assert set(np.unique(outputs)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(np.mean(np.asarray(outputs) > 0) - 0.75) < 0.02


def test_training_without_a_key_is_that_without_draws_or_refused(tmp_path: Any) -> None:
    norm = nn.BatchNorm1d(3)
    model = from_torch(norm, X)
    expected = norm.train()(torch.tensor(X)).detach().numpy()
    outputs, state = model(model.params, X, None, model.state, train=True)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    np.testing.assert_allclose(state["running_mean"], norm.running_mean, rtol=1e-5)
    model = from_torch(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), X)
    model.save(tmp_path / "saved")
    for found in (model, load_imported(tmp_path / "saved")):
        with pytest.raises(UserError, match=r"draws random numbers in training .*train=True"):
            found(found.params, X, train=True)


def test_an_evaluation_step_of_a_loss_that_draws_is_refused_or_given_a_key() -> None:
    _, model = imported(ALWAYS["dropout"])
    step = jt.train_step(model.loss(lambda y, batch: jt.Loss.of(y**2)), jt.optim.sgd(0.1))
    state = step.init(model.params)
    with pytest.raises(UserError, match="draws random numbers in evaluation"):
        jt.eval_step(model.loss(lambda y, batch: jt.Loss.of(y**2)))(state, X)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        key = jax.random.key(0) if rng is None else rng
        return jt.Loss.of(model(params, batch, key, train=rng is not None)[0] ** 2), {}

    assert np.isfinite(jt.eval_step(loss_fn)(state, X)["loss"].total)


def test_a_source_that_would_not_draw_is_refused() -> None:
    _, model = imported(ALWAYS["rand"])
    with pytest.raises(UserError, match="draws random numbers in evaluation, which its source would not"):
        model.source()


DISTRIBUTIONS: dict[str, Callable[[], torch.distributions.Distribution]] = {
    "beta": lambda: Beta(torch.tensor(0.4), torch.tensor(2.0)),
    "dirichlet": lambda: Dirichlet(torch.tensor([0.1, 1.0, 3.0])),
    "gamma": lambda: Gamma(torch.tensor([0.3, 4.0]), torch.tensor(2.0)),
    "binomial": lambda: Binomial(20, torch.tensor(0.3)),
    "poisson": lambda: torch.distributions.Poisson(torch.tensor([0.5, 9.0])),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_samples_have_the_moments_of_their_distribution(name: str) -> None:
    made = DISTRIBUTIONS[name]()
    module = Function(lambda self, x: DISTRIBUTIONS[name]().sample((4000,)) + 0 * x.mean() * self.w[0]).float()
    samples = np.asarray(from_torch(module, X)({"w": np.ones(3, np.float32)}, X, jax.random.key(1), train=False)[0])
    error = 5 * np.sqrt(made.variance.numpy() / 4000)
    assert (np.abs(samples.mean(0) - made.mean.numpy()) < error).all()
    np.testing.assert_allclose(samples.var(0), made.variance.numpy(), rtol=0.15)


def test_the_gradient_of_gamma_samples_is_that_of_pytorch() -> None:
    shape = torch.tensor([0.3, 1.0, 4.0])
    module = Function(lambda self, x: Gamma(self.w.abs() + 0.2, 1.0).rsample((2000,)).mean(0)).float()
    model = from_torch(module, X)

    def mean(w: Any) -> Any:
        return model({"w": w}, X, jax.random.key(0), train=False)[0].sum()

    # The derivative of the mean of a gamma distribution with respect to its shape is 1.
    np.testing.assert_allclose(jax.grad(mean)(shape.numpy()), np.ones(3), atol=0.15)


def made_in_forward(self: Any, x: Tensor) -> Tensor:
    return x + torch.rand(3, generator=torch.Generator().manual_seed(0))


def seeded_in_forward(self: Any, x: Tensor) -> Tensor:
    self.generator.manual_seed(0)
    return x + torch.rand(3, generator=self.generator)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (made_in_forward, "draws the same numbers in each call"),
        (seeded_in_forward, "draws from a generator of its own"),
        (lambda self, x: Beta(self.w.abs(), 2.0).rsample() + x, "rsample of Beta or Dirichlet with a gradient"),
    ],
)
def test_draws_that_would_be_others_are_refused_by_line(fn: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"{message}.*\(test_evaluation_draws\.py:\d+: "):
        imported(fn)
