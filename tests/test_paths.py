"""Frozen parameters equal PyTorch's requires_grad=False: unchanged, without gradient and optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jaxtrain as jt
from jaxtrain.cost.flops import flops
from jaxtrain.optim import adamw
from jaxtrain.paths import merge, partition

PARAMS = {
    "body": {"kernel": np.linspace(-1, 1, 12).reshape(4, 3), "bias": np.full(3, 0.1)},
    "head": {"kernel": np.linspace(1, -1, 6).reshape(3, 2), "bias": np.zeros(2)},
}
BATCH = {"x": np.linspace(-2, 2, 24).reshape(6, 4), "y": np.linspace(0, 1, 12).reshape(6, 2)}


def loss_fn(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["body"]["kernel"] + params["body"]["bias"][None])
    error = hidden @ params["head"]["kernel"] + params["head"]["bias"][None] - batch["y"]
    return jt.Loss((error**2).sum(), len(error)), {}


def body(path):
    return path.startswith("body/")


def torch_run(steps, clip_norm=None, clip_value=None):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    with torch.no_grad():
        for layer, name in ((model[0], "body"), (model[2], "head")):
            layer.weight.copy_(torch.from_numpy(PARAMS[name]["kernel"].T))
            layer.bias.copy_(torch.from_numpy(PARAMS[name]["bias"]))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x, y = torch.from_numpy(BATCH["x"]), torch.from_numpy(BATCH["y"])
    for _ in range(steps):
        optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / len(x)).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
    return {
        name: {"kernel": layer.weight.detach().numpy().T, "bias": layer.bias.detach().numpy()}
        for layer, name in ((model[0], "body"), (model[2], "head"))
    }


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.3}, {"clip_value": 0.05}, {"clip_norm": 0.5, "clip_value": 0.1}]
)
def test_five_updates_with_a_frozen_body_equal_pytorch(options, streaming):
    expected = torch_run(5, **options)
    with jax.enable_x64(True):
        step = jt.train_step(
            loss_fn, adamw(0.1, weight_decay=0.1), precision="fp64", accumulate=3, frozen=body, **options
        )
        state = step.init(PARAMS, streaming=streaming)
        for _ in range(5):
            if not streaming:
                state, _ = step(state, BATCH)
                continue
            for i in range(3):
                state, _ = step.micro(state, {name: x[2 * i : 2 * i + 2] for name, x in BATCH.items()})
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(expected), strict=True
    ):
        assert np.linalg.norm(np.asarray(ours) - theirs) <= 1e-12 * np.linalg.norm(theirs), path
    np.testing.assert_array_equal(state.params["body"]["kernel"], PARAMS["body"]["kernel"])


def test_frozen_parameters_have_no_gradient_optimizer_state_or_decay():
    trained = jt.train_step(loss_fn, adamw(0.1, weight_decay=0.5))
    half = jt.train_step(loss_fn, adamw(0.1, weight_decay=0.5), frozen=body)
    batch = {name: x.astype(np.float32) for name, x in BATCH.items()}
    everything, head = trained.init(PARAMS), half.init(PARAMS)
    sizes = [sum(x.size for x in jax.tree.leaves(optax.tree.get(s.opt_state, "mu"))) for s in (everything, head)]
    assert sizes == [12 + 3 + 6 + 2, 6 + 2]
    # The backward pass computes only the gradients of the head's weights, not those of the body or its output.
    assert flops(half.pure, head, batch) == flops(trained.pure, everything, batch) - 2 * 6 * (3 * 2 + 4 * 3)
    _, metrics = half(head, batch)
    grads = jax.grad(lambda p: loss_fn(p, batch, None)[0].total / 6)(jax.tree.map(jnp.float32, PARAMS))
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads["head"]), rtol=1e-6)


def test_leaves_that_are_not_floating_point_are_unchanged():
    def with_table(params, batch, rng):
        return jt.Loss((params["w"][params["index"]] * batch).sum(), len(batch)), {}

    step = jt.train_step(with_table, optax.sgd(1.0))
    state = step.init({"w": np.zeros(3), "index": np.array([2, 0])})
    state, _ = step(state, np.array([1, 3], np.float32))
    np.testing.assert_array_equal(state.params["w"], [-1.5, 0, -0.5])
    np.testing.assert_array_equal(state.params["index"], [2, 0])


def test_merge_inverts_partition_including_none_leaves():
    tree = {"a": np.ones(2), "b": None, "c": [np.zeros(1), np.array(3)]}
    for frozen in (lambda path: True, lambda path: False, lambda path: path == "c/0"):
        merged = merge(*partition(tree, frozen))
        assert jax.tree.structure(merged) == jax.tree.structure(tree)
        assert [id(x) for x in jax.tree.leaves(merged)] == [id(x) for x in jax.tree.leaves(tree)]


def test_a_clip_value_that_is_not_positive_is_a_user_error():
    with pytest.raises(jt.UserError, match="clip_value must be positive, got 0: "):
        jt.train_step(loss_fn, optax.sgd(1.0), clip_value=0)
