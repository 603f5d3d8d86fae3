"""Supervised fine-tuning and preferences beside `transformers`' models with the formulas of TRL."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional as F

import jaxtrain as jt
from jaxtrain import losses, optim
from jaxtrain.models import (
    Llama,
    LlamaConfig,
    functional,
    llama,
    log_probs,
    neftune,
    with_neftune,
)
from jaxtrain.program.equations import visit
from parity.cases.built_in import token_batches
from parity.oracle.in_jax import in_float64
from parity.oracle.in_torch import InFloat64

UPDATES, BETA = 20, 0.4
SIZES = LlamaConfig(
    vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=16, initializer_range=0.3,
)  # fmt: skip
PAIRS, LENGTH = 3, 7


def batch(seed):
    """Return pairs [2 · PAIRS, LENGTH], the chosen texts first, with an answer of several tokens each."""
    draw = np.random.default_rng(seed)
    whole = draw.integers(1, 13, (2 * PAIRS, LENGTH + 1))
    starts, stops = draw.integers(1, 4, (2 * PAIRS, 1)), draw.integers(5, LENGTH + 1, (2 * PAIRS, 1))
    positions = np.arange(LENGTH)[None]
    return {
        "tokens": whole[:, :-1].astype(np.int32),
        "targets": whole[:, 1:].astype(np.int32),
        "weight": ((positions >= starts) & (positions < stops)).astype(float),
        "segments": (positions <= stops).astype(np.int32),
        "numbers": 1 + (positions >= draw.integers(2, 5, (2 * PAIRS, 1))).astype(np.int32),
        "sequence_weights": draw.uniform(0.5, 2.0, (2 * PAIRS, 2)),
        "reference": draw.uniform(-20.0, -10.0, 2 * PAIRS),
    }


def supervised(compute, params, batch, rng):
    found = compute(params, batch["tokens"], batch["targets"])
    loss = losses.supervised(
        -found,
        batch["weight"],
        segments=batch["numbers"],
        sequence_weights=batch["sequence_weights"],
        per_sequence=True,
    )
    return loss, {}


def torch_supervised(model, batch):
    logits = model(batch["tokens"], use_cache=False).logits
    total, count = 0.0, 0.0
    for row, number in np.ndindex(2 * PAIRS, 2):
        chosen = (batch["numbers"][row] == number + 1) & (batch["weight"][row] > 0)
        if chosen.any():
            weight = batch["sequence_weights"][row, number]
            total = total + weight * F.cross_entropy(logits[row, chosen], batch["targets"][row, chosen])
            count = count + weight
    return total / count


def preferences(compute, params, batch, rng):
    answers = (compute(params, batch["tokens"], batch["targets"]) * batch["weight"]).sum(-1)
    pairs = [*jnp.split(answers, 2), *jnp.split(batch["reference"], 2)]
    return jt.Loss.of(losses.dpo(*pairs, beta=BETA)), {}


def torch_preferences(model, batch):
    logits = model(batch["tokens"], use_cache=False).logits
    tokens = torch.gather(logits.log_softmax(-1), 2, batch["targets"][..., None])[..., 0]
    (chosen, rejected), reference = (tokens * batch["weight"]).sum(1).chunk(2), batch["reference"].chunk(2)
    return -F.logsigmoid(BETA * ((chosen - reference[0]) - (rejected - reference[1]))).mean()


def language_models():
    ours = functional(Llama(SIZES, rngs=nnx.Rngs(0)), log_probs)
    return ours, token_batches.torch_model(llama.to_hf(SIZES)), llama.torch_names(SIZES)


@pytest.mark.parametrize(
    ("models", "loss", "torch_loss"),
    [
        (language_models, supervised, torch_supervised),
        (language_models, preferences, torch_preferences),
    ],
)
def test_losses_gradients_and_updates_equal_those_of_transformers(models, loss, torch_loss):
    torch.manual_seed(0)
    (compute, like), model, names = models()
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    with jax.enable_x64():
        weights = {name: x.detach().numpy().copy() for name, x in model.named_parameters()}
        params = names.to_jax(weights, like)
        loss_fn = in_float64(lambda params, batch, rng: loss(compute, params, batch, rng))
        step = jt.train_step(loss_fn, optim.adamw(1e-3, eps=1e-5), precision="fp64")
        state = step.init(params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        grads = jax.jit(jax.grad(lambda params: mean(loss_fn(params, batch(0), None)[0])))(params)
        for i in range(UPDATES):
            optimizer.zero_grad()
            with InFloat64():
                expected = torch_loss(model, {name: as_torch(x) for name, x in batch(i).items()})
                expected.backward()
            if i == 0:
                assert_alike(names.to_torch(grads), {name: p.grad for name, p in model.named_parameters()}, 1e-10)
            optimizer.step()
            state, metrics = step(state, batch(i))
            np.testing.assert_allclose(metrics["loss"], expected.item(), rtol=1e-10 if i == 0 else 1e-8)
        assert_alike(names.to_torch(state.params), dict(model.named_parameters()), 1e-8)


def mean(loss):
    return loss.total / loss.weight


def as_torch(x):
    return torch.tensor(x, dtype=torch.int64 if np.issubdtype(x.dtype, np.integer) else torch.float64)


def assert_alike(ours, theirs, bar):
    """Compare arrays on the scale of all of them: the gradient of an attention key bias is 0."""
    assert ours.keys() == theirs.keys()
    scale = max(np.linalg.norm(x.detach().numpy()) for x in theirs.values())
    for name, expected in theirs.items():
        error = np.linalg.norm(ours[name] - expected.detach().numpy())
        assert error <= bar * scale, f"{name}: {error:.2g}"


@pytest.mark.parametrize(("kind", "ours"), [("sigmoid", losses.dpo), ("ipo", losses.ipo)])
def test_losses_of_pairs_equal_those_of_the_trainer_of_trl(kind, ours):
    trl = pytest.importorskip("trl")
    given = batch(0)
    mask = np.concatenate([np.zeros((2 * PAIRS, 1)), given["weight"]], axis=1)
    tokens = torch.tensor(-np.random.default_rng(1).exponential(2.0, (2 * PAIRS, LENGTH)), requires_grad=True)
    outputs = SimpleNamespace(
        log_probs=tokens * as_torch(given["weight"]), entropy=tokens, mean_logits=tokens, is_top1=tokens.detach() < 0
    )
    gathered = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=gathered, ld_alpha=None, aux_loss_enabled=False,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0], beta=BETA,
        use_weighting=False, _metrics={"eval": {name: [] for name in METRICS}}, _total_train_tokens=0,
    )  # fmt: skip
    reference = as_torch(given["reference"]).chunk(2)
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, LENGTH + 1), "completion_mask": torch.tensor(mask),
        "ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1],
    }  # fmt: skip
    expected = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    expected.backward()
    counts = np.split(given["weight"].sum(1), 2) if kind == "ipo" else ()

    def loss(tokens):
        answers = jnp.split((tokens * given["weight"]).sum(-1), 2)
        return ours(*answers, *jnp.split(given["reference"], 2), *counts, beta=BETA).mean()

    with jax.enable_x64():
        found, grads = jax.value_and_grad(loss)(jnp.asarray(tokens.detach().numpy()))
    np.testing.assert_allclose(found, expected.item(), rtol=1e-12)
    np.testing.assert_allclose(grads, tokens.grad.numpy(), rtol=1e-10, atol=1e-14)


METRICS = [
    "entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy", "rewards/chosen", "rewards/rejected",
    "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
]  # fmt: skip


def test_noise_of_embeddings_is_that_of_transformers_and_only_where_tokens_are_looked_up():
    from transformers.integrations.neftune import neftune_post_forward_hook

    shape, alpha = (4, 50, 20), 5.0
    module = SimpleNamespace(training=True, neftune_noise_alpha=alpha)
    theirs = neftune_post_forward_hook(module, None, torch.zeros(shape)).abs()
    ours = np.abs(neftune(jnp.zeros(shape), alpha, jax.random.key(0)))
    bound = alpha / np.sqrt(shape[1] * shape[2])
    for noise in (ours, theirs.numpy()):
        assert 0.995 * bound < noise.max() <= bound
        np.testing.assert_allclose(noise.mean(), bound / 2, rtol=0.03)
    np.testing.assert_array_equal(neftune(jnp.ones(shape), alpha, None), jnp.ones(shape))

    table, tokens, key = jax.random.normal(jax.random.key(1), (7, 4)), jnp.array([[1, 2], [3, 4]]), jax.random.key(0)
    tied = with_neftune(lambda params, tokens: params["wte"][tokens] @ params["wte"].T, "wte", alpha)
    expected = neftune(table[tokens], alpha, key) @ table.T
    np.testing.assert_allclose(tied({"wte": table}, tokens, rng=key), expected, rtol=1e-6)
    np.testing.assert_array_equal(tied({"wte": table}, tokens), table[tokens] @ table.T)
    with pytest.raises(jt.UserError, match=r"no parameter is 'wpe', .*: use one of wte"):
        with_neftune(lambda params: params["wte"], "wpe", 1.0)({"wte": table}, rng=key)


def test_log_probabilities_need_no_logits_of_all_tokens():
    compute, params = functional(Llama(SIZES, rngs=nnx.Rngs(0)), log_probs)
    given = batch(0)
    traced = jax.make_jaxpr(jax.grad(lambda p: compute(p, given["tokens"], given["targets"], chunk=4).sum()))(params)
    largest = max(v.aval.size for eqn in visit(traced.jaxpr) for v in eqn.outvars if v.aval.shape[-1:] == (13,))
    assert largest < given["tokens"].size * 13
    apply, _ = functional(Llama(SIZES, rngs=nnx.Rngs(0)))
    logits = apply(params, given["tokens"])
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), given["targets"][..., None], axis=2)[..., 0]
    np.testing.assert_allclose(compute(params, given["tokens"], given["targets"]), expected, rtol=1e-5)
