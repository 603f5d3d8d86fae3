"""Modules as people write them by hand, in the styles of published code: factories of (module, example batch).

language      recurrent networks, transformers and their tricks
vision        convolutional networks, heads and samplers
generative    autoencoders, flows, adversarial networks, diffusion
tabular       features by name, recommenders, sets, graphs
sequences     audio and time series
science       physics, operators, differential equations
learning      self-supervision and reinforcement learning
memory        checkpoints and reversible layers
state         hidden states, counters, momentum encoders and queues
tricks        closures, hooks, patches and what else people do to a module
"""

from collections.abc import Callable
from typing import Any

import torch

Made = tuple[torch.nn.Module, Any]
"""A module with random weights, and an example batch: an array, a tuple or a dict of arrays."""
Factory = Callable[[], Made]


def registered(styles: dict[str, Factory]) -> Callable[[Factory], Factory]:
    """Return a decorator that adds a factory to a table under its name."""

    def add(factory: Factory) -> Factory:
        styles[factory.__name__] = factory
        return factory

    return add
