"""Elementwise formulas of an imported module keep their inputs alone in low precision."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.passes import autocast
from jaxtrain.torch_import.graph import RECOMPUTED

torch = pytest.importorskip("torch")


class Formulas(torch.nn.Module):
    """A GELU that is written out, a gated SiLU, a residual connection and a norm."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.up(x)
        activated = 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * y**3)))
        gated = torch.nn.functional.silu(self.gate(activated)) * y
        total = x + self.down(gated)
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_formulas_are_computed_again_in_low_precision_alone():
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    model = jt.from_torch(Formulas(), x)
    graph = model._capture(model.params, x, train=False).graph
    found = [[node.op.split(".")[1] for node in x.kwargs["graph"].nodes] for x in graph.nodes if x.op == RECOMPUTED]
    assert [sorted(formula) for formula in found] == [
        sorted(["mul", "mul", "pow", "mul", "add", "mul", "tanh", "add"]),
        ["mul", "silu"],
        ["add", "mul", "rsqrt"],
    ]

    def loss(params):
        return (model(params, x)[0] ** 2).sum()

    kept = _kept(autocast(loss, jnp.bfloat16), model.params)
    assert kept.count(((2, 3, 4), "float32")) == 3, "the inputs of the two norms, and the result"
    with jax.enable_x64():
        wide = Formulas().double()
        wide.load_state_dict({name: torch.tensor(np.asarray(w)).double() for name, w in model.params.items()})
        model = jt.from_torch(wide, x.astype(np.float64))
        x = x.astype(np.float64)
        gradients = jax.jit(jax.grad(loss))(model.params)
        (wide(torch.tensor(x)) ** 2).sum().backward()
        for name, weight in wide.named_parameters():
            np.testing.assert_allclose(gradients[name], weight.grad, rtol=0, atol=1e-13)


def _kept(fn, *args):
    """Return the shapes and dtypes of what the backward pass keeps."""
    _, pull = jax.vjp(fn, *args)
    return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pull)]


LARGE = 12582912.0  # 1.5 · 2²³: its sum with a smaller number is an integer
STEPS = {
    "add": lambda m, x: x + LARGE,
    "add to": lambda m, x: LARGE + x,
    "sub": lambda m, x: x - LARGE,
    "sub from": lambda m, x: LARGE - x,
    "add a buffer": lambda m, x: x + m.large,
    "sub a buffer": lambda m, x: x - m.large,
    "add twice a half": lambda m, x: torch.add(x, LARGE / 2, alpha=2),
    "in place": lambda m, x: x.clone().sub_(LARGE),
    "one more": lambda m, x: x + 1.0,
    "transposed": lambda m, x: (x + LARGE).t().reshape(4, 3) - LARGE,
    "mul": lambda m, x: x * 1e30,
    "mul by its inverse": lambda m, x: 1e-30 * x,
    "div": lambda m, x: x / 1e30,
}


@pytest.mark.parametrize("seed", range(24))
def test_a_rounding_between_two_constants_is_kept_in_a_compiled_program(seed):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("large", torch.tensor([LARGE, LARGE, LARGE - 1]))

        def forward(self, x):
            x = x * self.weight
            for step in drawn:
                x = step(self, x)
            return x

    draw = random.Random(seed)
    kinds = [[STEPS[x] for x in STEPS if ("mul" in x or "div" in x) == are_products] for are_products in (False, True)]
    drawn = [draw.choice(kinds[seed % 4 == 0]) for _ in range(2 + seed % 3)]
    x = np.random.default_rng(seed).uniform(-4, 4, (4, 3)).astype(np.float32)
    module = Module()
    model = jt.from_torch(module, x)
    found, _ = jax.jit(model)(model.params, x)
    np.testing.assert_array_equal(found, module(torch.tensor(x)).detach())
