"""The mixture of experts and the loss of its router equal transformers in float64; ties, idle experts, precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func

from jaxtrain.errors import UserError
from jaxtrain.models import functional
from jaxtrain.models.mixtral import (
    EXPERTS,
    Experts,
    Mixtral,
    MixtralConfig,
    from_hf,
    load_balancing_loss,
    to_hf,
    torch_names,
)
from jaxtrain.passes.numerics.autocast import autocast
from jaxtrain.program.equations import visit
from parity.cases.built_in import token_batches
from parity.oracle.in_jax import in_float64
from parity.oracle.in_torch import InFloat64

CONFIG = MixtralConfig(
    vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=64, initializer_range=0.5, num_local_experts=5,
    num_experts_per_tok=2, output_router_logits=True,
)  # fmt: skip
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 6, 8))


def hf_config(config):
    written = to_hf(config)
    kept = {k: v for k, v in written.items() if k != "model_type"}
    return AutoConfig.for_model(written["model_type"], **kept, experts_implementation="eager")


@pytest.mark.parametrize("chosen", [1, 2, 5])
def test_a_layer_and_its_gradients_equal_transformers_in_float64(chosen):
    config = dataclasses.replace(CONFIG, num_experts_per_tok=chosen)
    cotangent = RNG.standard_normal(X.shape)
    theirs = MixtralSparseMoeBlock(hf_config(config)).double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.from_numpy(RNG.standard_normal(p.shape)))
        # One expert receives no token unless all are used.
        theirs.gate.weight[3] = 0
        theirs.gate.weight[4] = -theirs.gate.weight[:3].sum(0)
    x = torch.tensor(X, requires_grad=True)
    with InFloat64():
        out = theirs(x)
        grads = torch.autograd.grad(out, [x, *theirs.parameters()], torch.from_numpy(cotangent))
    apply, _ = functional(nnx.eval_shape(lambda: Experts(config, rngs=nnx.Rngs(0))))
    gate, gate_up, down = (p.detach().numpy() for p in theirs.parameters())
    params = {"gate": gate.T, "gate_up_proj": EXPERTS.to_jax(gate_up), "down_proj": EXPERTS.to_jax(down)}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):

        @jax.jit
        def pulled_back(params, x, cotangent):
            out, vjp, _ = jax.vjp(in_float64(apply), params, x, has_aux=True)
            return out, vjp(cotangent)

        ours, (dparams, dx) = pulled_back(params, X, cotangent)
    np.testing.assert_allclose(ours, out.detach().numpy(), rtol=0, atol=1e-12)
    found = [dx, dparams["gate"].T, *(EXPERTS.to_torch(np.asarray(dparams[k])) for k in ("gate_up_proj", "down_proj"))]
    # Relative to the largest gradient: if one expert is chosen, its weight is 1 and the router's gradient is 0.
    scale = max(grad.abs().max().item() for grad in grads)
    for mine, yours in zip(found, grads, strict=True):
        np.testing.assert_allclose(mine, yours.numpy(), rtol=0, atol=1e-13 * scale)


def test_an_expert_without_tokens_has_no_gradient():
    apply, params = functional(Experts(CONFIG, rngs=nnx.Rngs(0)))
    x = np.abs(X.astype(np.float32))
    # All tokens have positive entries: each next expert is less likely.
    params["gate"] = -jnp.broadcast_to(jnp.arange(5.0), (8, 5))
    grads = jax.grad(lambda params: (apply(params, x)[0] ** 2).sum())(params)
    used = [np.abs(grads["down_proj"][i]).max() > 0 for i in range(5)]
    assert used == [True, True, False, False, False]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_ties_choose_the_experts_of_lower_index():
    apply, params = functional(Experts(CONFIG, rngs=nnx.Rngs(0)))
    params["gate"] = jnp.zeros((8, 5))
    x = X.astype(np.float32)
    first_two = {**params, "gate": jnp.zeros((8, 5)).at[:, 2:].add(-1e3)}
    ones = np.ones_like(x)
    np.testing.assert_allclose(apply(params, ones)[0], apply(first_two, ones)[0], rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_the_routers_loss_and_gradient_equal_transformers(masked):
    logits = RNG.standard_normal((3, 2, 6, 5))
    mask = RNG.random((2, 6)) > 0.3 if masked else None
    theirs = torch.tensor(logits, requires_grad=True)
    rows = tuple(theirs.reshape(3, 12, 5).unbind())
    with InFloat64():
        expected = load_balancing_loss_func(rows, 5, 2, None if mask is None else torch.from_numpy(mask))
        (grad,) = torch.autograd.grad(expected, theirs)
    with jax.enable_x64(True):
        ours, found = jax.value_and_grad(load_balancing_loss)(logits, 2, mask)
    assert float(ours) == pytest.approx(expected.item(), rel=1e-14)
    np.testing.assert_allclose(found, grad.numpy(), rtol=0, atol=1e-15)


def test_configs_round_trip_through_transformers():
    read = hf_config(CONFIG)
    assert from_hf(to_hf(CONFIG)) == CONFIG
    assert from_hf(read.to_dict()) == CONFIG
    with pytest.raises(UserError, match=r"router_jitter_noise 0\.1 is not supported"):
        from_hf({**to_hf(CONFIG), "router_jitter_noise": 0.1})
    with pytest.raises(UserError, match="model_type must be 'mixtral', got 'llama'"):
        from_hf({**to_hf(CONFIG), "model_type": "llama"})
    older = {k: v for k, v in to_hf(CONFIG).items() if k not in ("rope_parameters", "head_dim", "rms_norm_eps")}
    assert from_hf(older) == CONFIG


def test_router_logits_are_returned_if_requested():
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    apply, params = functional(Mixtral(CONFIG, rngs=nnx.Rngs(0)))
    logits, router_logits = jax.jit(apply)(params, tokens)
    assert router_logits.shape == (2, 2, 4, 5)
    config = dataclasses.replace(CONFIG, output_router_logits=False)
    without, _ = functional(nnx.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0))))
    np.testing.assert_array_equal(jax.jit(without)(params, tokens), logits)


def test_torch_names_equal_those_of_transformers():
    _, like = functional(nnx.eval_shape(lambda: Mixtral(CONFIG, rngs=nnx.Rngs(0))))
    tensors = torch_names(CONFIG).to_torch(jax.tree.map(lambda x: np.zeros(x.shape), like))
    theirs = token_batches.torch_model(to_hf(CONFIG)).state_dict()
    assert {k: v.shape for k, v in tensors.items()} == {k: tuple(v.shape) for k, v in theirs.items()}


def test_under_autocast_products_are_in_low_precision_and_the_router_chooses_in_float32():
    apply, params = functional(Experts(CONFIG, rngs=nnx.Rngs(0)))
    cast = autocast(lambda params, x: apply(params, x)[0].astype(np.float32).sum(), jnp.bfloat16)
    found = list(visit(jax.make_jaxpr(jax.grad(cast))(params, X.astype(np.float32)).jaxpr))
    products = [eqn for eqn in found if eqn.primitive.name in ("ragged_dot_general", "dot_general")]
    floating = [v.aval for eqn in products for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
    # The router's product and two grouped ones, the gradients of their weights, and one of an input.
    assert len(products) == 7
    assert all(aval.dtype == jnp.bfloat16 for aval in floating)
    assert all(eqn.invars[0].aval.dtype == np.float32 for eqn in found if eqn.primitive.name == "top_k")
