"""BatchNorm over groups of rows: statistics per device, as in PyTorch's DistributedDataParallel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.distributed import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.models import BatchNorm, functional_with_state
from jaxtrain.models.batch_norm import set_batch_norm_groups
from tests.distributed.programs import RUNS, distance, train

GROUPS = 2


def test_groups_equal_the_ranks_of_ddp_with_running_statistics_of_rank_0():
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(2, 8, 5, 3, 4))
    norm = torch.nn.BatchNorm2d(4, dtype=torch.float64)
    theirs = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    first, second = theirs.chunk(GROUPS)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 5.0))
    # Only the forward pass is per rank; gradients are summed over ranks.
    y_of_rank_1 = torch.nn.functional.batch_norm(second, None, None, norm.weight, norm.bias, training=True)
    y = torch.cat([norm(first), y_of_rank_1])
    (y * torch.tensor(g.transpose(0, 3, 1, 2))).sum().backward()

    with jax.enable_x64(True):
        apply, params, state = functional_with_state(set_batch_norm_groups(BatchNorm(4), GROUPS))
        params = {"scale": jnp.arange(1.0, 5.0), "bias": jnp.zeros(4)}
        state = jax.tree.map(lambda s: s.astype(np.float64) if s.ndim else s, state)

        def loss(params, x):
            y, after = apply(params, state, x, True)
            return (y * g).sum(), (y, after)

        (of_params, of_x), (ours, after) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, jnp.asarray(x))
    for got, expected in [
        (ours, y.detach().numpy().transpose(0, 2, 3, 1)),
        (of_x, theirs.grad.numpy().transpose(0, 2, 3, 1)),
        (of_params["scale"], norm.weight.grad.numpy()),
        (of_params["bias"], norm.bias.grad.numpy()),
        (after["mean"], norm.running_mean.numpy()),
        (after["var"], norm.running_var.numpy()),
    ]:
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
    assert int(after["count"]) == int(norm.num_batches_tracked)


def test_a_mesh_has_one_group_per_device():
    with jax.enable_x64(True):
        alone, _ = train(RUNS["cnn"](groups=4), steps=3)
        state, _ = train(RUNS["cnn"](groups=4), make_mesh("data=2,fsdp=2"), steps=3)
    assert distance(alone.params, state.params) < 1e-12
    assert distance(alone.model_state, state.model_state) < 1e-12


def test_rows_indivisible_by_the_groups_raise_an_error():
    norm = set_batch_norm_groups(nnx.List([BatchNorm(2)]), 3)[0]
    with pytest.raises(UserError, match="4 rows do not divide into 3 BatchNorm groups: use a multiple of 3"):
        norm(jnp.ones((4, 2)), True)
