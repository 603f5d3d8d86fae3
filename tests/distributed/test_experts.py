"""Experts on a mesh: every token reaches its experts, whatever the balance; errors; what a step sends and holds."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtrain.distributed import exchange, make_mesh
from jaxtrain.distributed.constraints import ShardingConstraints
from jaxtrain.distributed.experts import divided_experts
from jaxtrain.distributed.sharding import check_experts
from jaxtrain.errors import UserError
from jaxtrain.models import llama, mixtral
from jaxtrain.models.routed_experts import compute_sorted
from tests.distributed.programs import RUNS

ROWS, TOKENS, WIDTH, EXPERTS, CHOSEN = 8, 2, 3, 8, 3
RNG = np.random.default_rng(0)
X, KERNEL = RNG.standard_normal((ROWS, TOKENS, WIDTH)), RNG.standard_normal((EXPERTS, WIDTH, WIDTH))
BALANCES = {
    "random": RNG.random((ROWS, TOKENS, EXPERTS)).argsort(-1)[..., :CHOSEN],
    "all to one device": np.broadcast_to([5, 4, 7], (ROWS, TOKENS, CHOSEN)),
    "each row to one device": np.broadcast_to(
        (np.arange(ROWS)[:, None, None] + np.arange(3)) % EXPERTS, (ROWS, TOKENS, 3)
    ),
}


def linear(tokens, group_sizes, kernel):
    return lax.ragged_dot(jnp.tanh(tokens), kernel, group_sizes)


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Compute what the documentation of `jax.lax.ragged_all_to_all` states, which XLA has for GPUs and TPUs only."""
    operands, offsets, sizes, places = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    n, slices = sizes.shape
    per_device, me = slices // n, lax.axis_index(axis_name)
    i = jnp.arange(len(operand), dtype=np.int32)
    for source in range(n):
        for j in range(per_device):
            of = me * per_device + j
            place = jnp.where(i < sizes[source, of], places[source, of] + i, len(output))
            output = output.at[place].set(operands[source][(offsets[source, of] + i) % len(operand)], mode="drop")
    # The receiver writes as many rows as it states.
    stated = lax.all_to_all(send_sizes.reshape(n, -1), axis_name, 0, 0).reshape(-1)
    return jnp.where((stated == recv_sizes).all(), output, jnp.nan)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_no_token_is_dropped_whatever_the_balance(on_gpu, double, monkeypatch):
    monkeypatch.setattr(exchange.lax, "ragged_all_to_all", ragged_all_to_all)
    divided = divided_experts(linear, ShardingConstraints(make_mesh("data=2,expert=2"), ROWS), on_gpu)

    def gradients(compute, chosen, x, kernel):
        total = lambda x, kernel: ((y := compute(x, chosen, kernel)) ** 2).sum() + y.sum()  # noqa: E731
        return jax.value_and_grad(total, (0, 1))(x, kernel)

    one, several = (jax.jit(partial(gradients, compute)) for compute in (partial(compute_sorted, linear), divided))
    for balance, chosen in BALANCES.items():
        expected, found = (f(chosen.astype(np.int32), X, KERNEL) for f in (one, several))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=balance)


@pytest.mark.parametrize(
    ("name", "rules", "message"),
    [
        (
            "llama",
            llama.SHARDING,
            "mesh axis expert=3 divides the experts of a model, and no sharding rule of this model names it: "
            "use data or fsdp",
        ),
        ("mlp", None, "no sharding rule of this model names it: use data or fsdp"),
        (
            "mixtral",
            mixtral.SHARDING,
            "mesh axis expert=3 does not divide the 4 experts of layers/mlp/down_proj: use a divisor of 4",
        ),
    ],
)
def test_a_model_that_the_axis_cannot_divide_raises_an_error(name, rules, message):
    params, _ = jax.eval_shape(RUNS[name]().make)
    with pytest.raises(UserError, match=re.escape(message)):
        check_experts(params, make_mesh("expert=3", jax.devices()[:3]), rules)
