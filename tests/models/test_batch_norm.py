"""BatchNorm equals `torch.nn.BatchNorm2d`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtrain.errors import UserError
from jaxtrain.models import BatchNorm, functional_with_state


@pytest.mark.parametrize("momentum", [0.1, 0.5])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
@pytest.mark.parametrize("rows", [2, 5])
def test_outputs_gradients_and_running_statistics_equal_pytorch_in_float64(rows, offset, momentum):
    # With a mean of 3000, E[x²] − E[x]² would lose the variance to cancellation; few rows expose n / (n − 1).
    rng = np.random.default_rng(0)
    batches = offset + rng.standard_normal((4, rows, 1, 2, 3)) * [0.1, 1, 10]
    weight = rng.standard_normal((rows, 1, 2, 3))
    theirs = torch.nn.BatchNorm2d(3, momentum=momentum).double()
    with jax.enable_x64(True):
        apply, params, state = functional_with_state(BatchNorm(3, momentum=momentum))
        params = jax.tree.map(lambda x: x.astype(np.float64), params)
        state = {**state, "mean": state["mean"].astype(np.float64), "var": state["var"].astype(np.float64)}

        def loss(params, x, state):
            out, state = apply(params, state, x, True)
            return (out * weight).sum(), (out, state)

        for x in batches:
            gradient, (out, state) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, jnp.asarray(x), state)
            expected_in = torch.from_numpy(x.transpose(0, 3, 1, 2).copy()).requires_grad_()
            expected = theirs(expected_in)
            theirs.zero_grad()
            (expected * torch.from_numpy(weight.transpose(0, 3, 1, 2).copy())).sum().backward()
            pairs = [
                (out, expected.detach().numpy().transpose(0, 2, 3, 1)),
                (gradient[1], expected_in.grad.numpy().transpose(0, 2, 3, 1)),
                (gradient[0]["scale"], theirs.weight.grad.numpy()),
                (gradient[0]["bias"], theirs.bias.grad.numpy()),
                (state["mean"], theirs.running_mean.numpy()),
                (state["var"], theirs.running_var.numpy()),
            ]
            for ours, reference in pairs:
                # Subtracting a mean of 3000 loses four digits in both frameworks.
                bar = 1e-12 if offset == 0 else 1e-8
                assert np.linalg.norm(np.asarray(ours) - reference) <= bar * np.linalg.norm(reference)
        assert int(state["count"]) == int(theirs.num_batches_tracked) == 4
        evaluated, unchanged = apply(params, state, jnp.asarray(batches[0]), False)
        expected = theirs.eval()(torch.from_numpy(batches[0].transpose(0, 3, 1, 2).copy()))
        reference = expected.detach().numpy().transpose(0, 2, 3, 1)
        assert np.linalg.norm(np.asarray(evaluated) - reference) <= 1e-10 * np.linalg.norm(reference)
        for name in state:
            np.testing.assert_array_equal(state[name], unchanged[name])


def test_training_on_one_value_per_channel_is_refused_as_in_pytorch():
    norm = BatchNorm(3)
    with pytest.raises(UserError, match="more than 1 value per channel to train on, got 1"):
        norm(jnp.ones((1, 3)), True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(3)(torch.ones(1, 3))
    norm(jnp.ones((1, 3)), False)
