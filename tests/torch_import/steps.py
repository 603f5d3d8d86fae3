"""Steps of training of an imported module beside PyTorch's, in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from tests.torch_import.judge import at_path
from tests.torch_import.reference import weighted

RATE, STEPS = 0.05, 4


@pytest.fixture(name="in_float64")
def in_float64() -> Iterator[None]:
    """Make float64 the default of both."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64():
        yield
    torch.set_default_dtype(before)


def batches() -> list[np.ndarray]:
    """Return a batch for each step and one for evaluation."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal((4, 3)) for _ in range(STEPS + 1)]


def in_pytorch(module: nn.Module, names: list[str]) -> list[np.ndarray]:
    """Return outputs, parameters and state over steps of gradient descent, and outputs in evaluation."""
    *training, last = map(torch.tensor, batches())
    trained = [p for _, p in sorted(module.named_parameters()) if p.requires_grad]
    found = []
    for x in training:
        module.zero_grad()
        y = module(x)
        weighted([y], torch).backward()
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
        found += [y.detach().numpy(), *(p.detach().numpy().copy() for p in trained if p.grad is not None)]
        found += [at_path(module, name).copy() for name in names]
    return [*found, module.eval()(last).detach().numpy()]


def in_jax(model: Any) -> list[np.ndarray]:
    """Return the same of the import."""
    *training, last = batches()

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y, new = model(params, x, jax.random.key(0), state)
            return weighted([y], jnp), (y, new)

        (_, (y, new)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return y, {k: p if model.frozen(k) else p - RATE * grads[k] for k, p in params.items()}, new

    params, state, found = model.params, model.state, []
    for x in training:
        y, params, state = step(params, state, x)
        own = sorted(model.names.to_torch(params).items())
        trained = [p for name, p in own if not model.frozen(name)]
        found += [np.asarray(y), *map(np.asarray, trained)]
        found += [] if state is None else map(np.asarray, model.state_names.to_torch(state).values())
    return [*found, np.asarray(model(params, last, None, state)[0])]


def equal(model: Any, module: nn.Module) -> None:
    """Compare every value of both."""
    ours, theirs = (
        in_jax(model),
        in_pytorch(module, [*(model.state_names.to_torch(model.state) if model.state else {})]),
    )
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12, err_msg=f"value {i}")
