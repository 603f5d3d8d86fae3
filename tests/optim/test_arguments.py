"""Arguments of optimizers have the bounds of PyTorch's constructors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import optim
from jaxtrain.errors import UserError

torch = pytest.importorskip("torch")

PAIRS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
THEIRS = {"learning_rate": "lr"}
NUMBERS = [
    *("learning_rate", "eps", "weight_decay", "momentum", "rho", "lr_decay", "initial_accumulator_value", "alpha"),
    *("momentum_decay", "beta2_decay", "d", "lambd", "t0", "dampening"),
]
VALUES = [-1.5, -1e-3, 0.0, 0.5, 0.999, 1.0, 1.5]


def accepts(make):
    try:
        make()
    except (UserError, ValueError):
        return False
    return True


def cases():
    for name in PAIRS:
        takes = optim.__dict__[name].__wrapped__.__code__
        takes = takes.co_varnames[: takes.co_argcount + takes.co_kwonlyargcount]
        for argument in NUMBERS:
            # Adafactor has a pair; PyTorch's Muon does not check its eps.
            if argument in takes and (name, argument) not in {("adafactor", "eps"), ("muon", "eps")}:
                for value in VALUES:
                    yield name, {argument: value}, {THEIRS.get(argument, argument): value}
        if "b1" in takes:
            for value in VALUES:
                yield name, {"b1": value}, {"betas": (value, 0.5)}
                yield name, {"b2": value}, {"betas": (0.5, value)}
    for etas in ((0.0, 1.2), (0.5, 1.0), (0.5, 1.2), (1.0, 1.5), (-0.5, 2.0)):
        yield "rprop", {"etas": etas}, {"etas": etas}
    for eps in ((-1.0, 1e-3), (None, -1e-3), (None, 1e-3), (0.0, 0.0)):
        yield "adafactor", {"eps": eps}, {"eps": eps}


def test_bounds_are_those_of_pytorch():
    tried = refused = 0
    for name, ours, theirs in cases():
        found = accepts(lambda name=name, ours=ours: getattr(optim, name)(**ours))
        expected = accepts(
            lambda name=name, theirs=theirs: PAIRS[name]([torch.nn.Parameter(torch.ones(2, 2))], **theirs)
        )
        assert found == expected, (name, ours, f"PyTorch {'accepts' if expected else 'refuses'} it")
        tried, refused = tried + 1, refused + (not expected)
    assert tried > 300
    assert refused > 80


@pytest.mark.parametrize("name", ["adam8bit", "adamw8bit", "sgd8bit"])
def test_8_bit_optimizers_have_the_same_bounds(name):
    for argument in ("learning_rate", "weight_decay"):
        with pytest.raises(UserError, match=rf"{argument} of {name} must be at least 0, got -0\.5"):
            getattr(optim, name)(**{argument: -0.5})


def test_numbers_of_any_type_are_checked_and_traced_ones_and_schedules_are_not():
    for rate in (np.float32(-1.0), jnp.float32(-1.0), float("nan")):
        with pytest.raises(UserError, match="learning_rate of adamw must be at least 0"):
            optim.adamw(rate)
    with pytest.raises(UserError, match=r"b2 of adam must be in \[0, 1\), got 1\.0"):
        optim.adam(1e-3, 0.9, 1.0)
    optim.adamw(lambda count: -1.0)

    def traced(rate):
        tx = optim.sgd(rate)
        return tx.update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1))[0]

    assert float(jax.jit(traced)(-1.0)[0]) == 1.0
