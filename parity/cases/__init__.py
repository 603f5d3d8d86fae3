"""The cases that come with the harness, by name. Listing them imports neither framework."""

import importlib
from collections.abc import Callable
from functools import partial

from parity.case import Case

SUMMARIES = {
    "mlp": "perceptron 784-512-10, ReLU",
    "cnn": "convolution 3→16 of 3×3, ReLU, linear, on 32×32 images",
    "cnn-bn": "the same with BatchNorm, on 10×10 images, running statistics included",
    "gpt2": "transformers.GPT2LMHeadModel of 2 layers, width 32, 4 heads",
}


def _load(name: str) -> Case:
    try:
        module = importlib.import_module(f"parity.cases.{name.replace('-', '_')}")
    except ModuleNotFoundError as missing:
        from jaxtrain.errors import UserError

        package = str(missing.name).partition(".")[0]
        if package not in ("torch", "transformers"):
            raise
        raise UserError(f"{package} is not installed: pip install 'jaxtrain[parity]'") from missing
    return module.case()


CASES: dict[str, Callable[[], Case]] = {name: partial(_load, name) for name in SUMMARIES}
"""What makes each case; calling it imports what the case needs, or raises `UserError` where that is not installed."""
