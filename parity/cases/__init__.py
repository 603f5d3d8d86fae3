"""The cases that come with the harness, by name. Listing them imports neither framework."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from parity.case import Case

SUMMARIES = {
    "mlp": "perceptron 784-512-10, ReLU",
    "cnn": "convolution 3→16 of 3×3, ReLU, linear, on 32×32 images",
    "cnn-bn": "the same with BatchNorm, on 10×10 images, running statistics included",
    "gpt2": "transformers.GPT2LMHeadModel of 2 layers, width 32, 4 heads",
    "autograd.square": "(w·x + b)², every factor a parameter",
    "autograd.cubic": "x³ + 2x + 1",
    "autograd.detach": "a factor detached",
    "autograd.no-grad": "a target computed without gradient",
    "autograd.double-backward": "a second derivative in the loss",
    "autograd.reuse": "a parameter used twice",
    "gradient-penalty": "Wasserstein critic 8-16-16-1, softplus, with the gradient of its input in the loss",
    "maml": "perceptron 1-16-16-1, tanh, trained through a step of gradient descent",
}
"""What each case is. A dotted name is one of several cases of a module."""


def _load(name: str, **options: Any) -> Case:
    from jaxtrain.errors import UserError  # and with it JAX, which listing does without

    module_name, _, function = name.replace("-", "_").partition(".")
    try:
        module = importlib.import_module(f"parity.cases.{module_name}")
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        if package not in ("torch", "transformers"):
            raise
        raise UserError(f"{package} is not installed: pip install 'jaxtrain[parity]'") from missing
    make = getattr(module, function or "case")
    for option in options.keys() - inspect.signature(make).parameters.keys():
        raise UserError(f"{name} has no {option}: leave it out, or name only cases that have it")
    return make(**options)


CASES: dict[str, Callable[..., Case]] = {name: partial(_load, name) for name in SUMMARIES}
"""What makes each case, of its function's keyword arguments; calling it imports what the case needs, or raises
`UserError` where that is not installed."""


def case_of(name: str, **options: Any) -> Case:
    """The case of that name, or of a user's file, `path/to/file.py::name`."""
    if "::" in name:
        from parity.cases.own import own_case

        return own_case(name, **options)
    return CASES[name](**options)
