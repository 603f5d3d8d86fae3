"""Parameter groups: updates, frozen parameters, weight decay and reported learning rates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.optim import adamw, all_but, groups, no_decay, sgd, used_learning_rate, used_learning_rates

PARAMS = {
    "blocks": {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(2, 3.0)},
    "norm": {"scale": jnp.full(2, 4.0)},
}


def loss_fn(params, batch, rng):
    del rng
    x = (batch @ params["blocks"]["kernel"] + params["blocks"]["bias"][None]) * params["norm"]["scale"][None]
    return jt.Loss((x**2).sum(), weight=len(batch)), {}


def test_each_group_is_updated_as_if_alone():
    tx = groups(
        lambda path: "norms" if path.startswith("norm") else "rest",
        {"norms": adamw(0.1, weight_decay=0.0), "rest": sgd(0.5, momentum=0.9)},
    )
    state, params = tx.init(PARAMS), PARAMS
    alone = {
        "norm": (adamw(0.1, weight_decay=0.0), PARAMS["norm"]),
        "blocks": (sgd(0.5, momentum=0.9), PARAMS["blocks"]),
    }
    states = {name: tx.init(params) for name, (tx, params) in alone.items()}
    for _ in range(3):
        updates, state = tx.update(PARAMS, state, params)
        for name, (part, _) in alone.items():
            expected, states[name] = part.update(PARAMS[name], states[name], params[name])
            jax.tree.map(np.testing.assert_array_equal, updates[name], expected)
        params = optax.apply_updates(params, updates)


def test_a_frozen_group_has_no_state_and_is_not_updated():
    tx = groups(lambda path: "body" if "blocks" in path else "head", {"body": optax.set_to_zero(), "head": adamw(0.1)})
    step = jt.train_step(loss_fn, tx)
    state = step.init(PARAMS)
    assert all(x.size <= 2 for x in jax.tree.leaves(state.opt_state))
    state, metrics = step(state, jnp.ones((4, 2)))
    jax.tree.map(np.testing.assert_array_equal, state.params["blocks"], PARAMS["blocks"])
    assert np.all(np.asarray(state.params["norm"]["scale"]) < 4)
    np.testing.assert_allclose(metrics["lr"], 0.1)


def test_groups_work_with_parameters_frozen_by_the_step():
    tx = groups(
        lambda path: "decayed" if path.endswith("kernel") else "rest", {"decayed": adamw(0.1), "rest": sgd(0.1)}
    )
    step = jt.train_step(loss_fn, tx, frozen=lambda path: path == "blocks/bias")
    state, metrics = step(step.init(PARAMS), jnp.ones((4, 2)))
    np.testing.assert_array_equal(state.params["blocks"]["bias"], PARAMS["blocks"]["bias"])
    assert np.all(np.asarray(state.params["blocks"]["kernel"]) != 2)
    assert "lr" not in metrics
    assert set(used_learning_rates(state.opt_state)) == {"decayed", "rest"}


def test_several_learning_rates_are_reported_per_group():
    tx = groups(
        lambda path: path.split("/")[0], {"blocks": sgd(lambda t: 0.5 / (1.0 + t.astype(np.float32))), "norm": sgd(0.1)}
    )
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = tx.update(PARAMS, state, PARAMS)
    assert used_learning_rate(state) is None
    rates = used_learning_rates(state)
    np.testing.assert_allclose([rates["blocks"], rates["norm"]], [0.25, 0.1])
    assert used_learning_rates(sgd(0.1).init(PARAMS)) == {}


def test_an_unknown_group_is_named():
    with pytest.raises(UserError, match=r"group 'bodi' of blocks/bias does not exist: use one of body"):
        groups(lambda path: "bodi", {"body": sgd()}).init(PARAMS)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_biases_and_norms_do_not_decay_where_masked(make):
    tx = make(1.0, weight_decay=0.5, mask=all_but(no_decay))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["blocks"]["kernel"], -1.0)
    for update in (updates["blocks"]["bias"], updates["norm"]["scale"]):
        np.testing.assert_array_equal(update, 0.0)


def test_names_of_pytorch_do_not_decay_either():
    names = {
        "stem.conv.weight": (4, 3, 3, 3),
        "stem.bn.weight": (4,),
        "stem.bn.bias": (4,),
        "head.weight": (2, 4),
        "head.bias": (2,),
        "blocks.attn.bias": (3, 3),
        "logit_scale": (),
        "bias_free.weight": (2, 2),
    }
    params = {name: np.ones(shape) for name, shape in names.items()}
    decays = all_but(no_decay)(params)
    assert {name for name in decays if decays[name]} == {"stem.conv.weight", "head.weight", "bias_free.weight"}
    nested = {"norm": {"weight": np.ones(3)}, "dense": {"weight": np.ones((3, 3)), "bias": np.ones((2, 3))}}
    assert all_but(no_decay)(nested) == {"norm": {"weight": False}, "dense": {"weight": True, "bias": False}}


def test_a_rule_that_selects_no_parameter_is_refused():
    message = r"all_but\(<lambda>\) selects no parameter: leave the mask out, .* blocks/bias"
    with pytest.raises(UserError, match=message):
        adamw(1e-3, mask=all_but(lambda path: path.endswith("b"))).init(PARAMS)
    with pytest.raises(UserError, match=r"all_but\(no_decay\) selects no parameter"):
        adamw(1e-3, mask=all_but(no_decay)).init({"kernel": jnp.ones((2, 2))})
    assert all_but(lambda path: False)({}) == {}
    with pytest.raises(UserError, match=r"takes a function of a parameter's path, got 'bias': use all_but\(no_decay\)"):
        all_but("bias")


def test_what_decays_of_an_imported_module_is_what_the_model_names():
    torch = pytest.importorskip("torch")

    def block():
        return torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.PReLU(4))

    # The layers of the second are stacked, those of the third in two stacks.
    modules = [
        (torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()), (2, 3, 5, 5)),
        (torch.nn.Sequential(*[block() for _ in range(4)]), (2, 4)),
        (torch.nn.Sequential(*[block() for _ in range(3)], torch.nn.Tanh(), *[block() for _ in range(3)]), (2, 4)),
        (torch.nn.LayerNorm(4), (2, 4)),
    ]
    stacked = set()
    for module, shape in modules:
        model = jt.from_torch(module, np.ones(shape, np.float32))
        decays = all_but(no_decay)(model.params)
        assert {name for name in decays if not decays[name]} == {name for name in decays if model.no_decay(name)}
        assert len(set(decays.values())) == 2 or isinstance(module, torch.nn.LayerNorm)
        stacked |= {name for name in decays if "*" in name or ":" in name}
    assert stacked
