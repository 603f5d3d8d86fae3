"""Adapters and their folders beside `peft` on the same models: trained, saved, merged."""

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, Llama, LlamaConfig, functional, load_adapters, lora, save_adapters
from jaxtrain.models import gpt2 as gpt2_family
from jaxtrain.models import llama as llama_family
from jaxtrain.models.peft import torch_names
from parity.cases.built_in import gpt2_case, token_batches
from parity.oracle.in_jax import in_float64
from parity.oracle.in_torch import InFloat64
from tests.models.programs import widened

UPDATES = 20
TOKENS = np.random.default_rng(0).integers(0, 11, size=(UPDATES, 3, 7)).astype(np.int32)
GPT2_SIZES = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
LLAMA_SIZES = LlamaConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=2, max_position_embeddings=16, initializer_range=0.3,
)  # fmt: skip
GPT2_TARGETS, LLAMA_TARGETS = ["c_attn", "mlp.c_proj"], ["q_proj", "o_proj", "down_proj"]


def gpt2_pair():
    theirs = gpt2_case.case(reference=GPT2_SIZES).torch_model()
    return theirs, GPT2(GPT2_SIZES, rngs=nnx.Rngs(0)), gpt2_family.torch_names()


def llama_pair():
    theirs = token_batches.torch_model(llama_family.to_hf(LLAMA_SIZES))
    return theirs, Llama(LLAMA_SIZES, rngs=nnx.Rngs(0)), llama_family.torch_names(LLAMA_SIZES)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("pair", "targets", "method"),
    [
        (gpt2_pair, GPT2_TARGETS, {"use_rslora": True}),
        (llama_pair, LLAMA_TARGETS, {"use_dora": True}),
        (gpt2_pair, GPT2_TARGETS, {"use_dora": True}),
    ],
)
def test_adapters_are_trained_saved_and_merged_as_in_peft(tmp_path, pair, targets, method):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, ours, names = pair()
    model = model.double().eval()
    weights = {name: x.numpy().copy() for name, x in model.state_dict().items()}
    settings = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=targets, fan_in_fan_out=targets is GPT2_TARGETS, **method
    )
    theirs = peft.get_peft_model(model, settings)
    for name, x in theirs.named_parameters():
        if "lora_" in name:
            x.data += 0.3 * torch.randn_like(x)
    theirs = theirs.double()
    theirs.save_pretrained(tmp_path / "theirs")
    apply, like = functional(ours)
    with jax.enable_x64():
        base = names.to_jax(weights, like)
        adapters, config = load_adapters(tmp_path / "theirs", widened(like), names)
        assert (config.dora, config.rslora) == (bool(method.get("use_dora")), bool(method.get("use_rslora")))

        def loss_fn(params, batch, rng):
            logits = lora.with_adapters(apply, config)(params, batch[:, :-1])
            return jt.Loss.of(cross_entropy(logits, batch[:, 1:])), {}

        loss_fn = in_float64(loss_fn)
        step = jt.train_step(loss_fn, optim.adamw(1e-2), precision="fp64", frozen=lora.frozen)
        state = step.init({"base": base, "lora": adapters})
        grads = jax.jit(jax.grad(lambda a: mean(loss_fn({"base": base, "lora": a}, TOKENS[0], None)[0])))(adapters)
        table = torch_names(adapters, names)
        trained = {saved_name(name): p for name, p in theirs.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        for i in range(UPDATES):
            optimizer.zero_grad()
            with InFloat64():
                expected = torch_loss(theirs, TOKENS[i])
                expected.backward()
            if i == 0:
                assert_alike(table.to_torch(grads), {name: p.grad for name, p in trained.items()}, 1e-10)
            optimizer.step()
            state, metrics = step(state, TOKENS[i])
            np.testing.assert_allclose(metrics["loss"], expected.item(), rtol=1e-10 if i == 0 else 1e-8)
        moments = [optax.tree.get(state.opt_state, moment)["lora"] for moment in ("mu", "nu")]
        slots = ("exp_avg", "exp_avg_sq")
        assert_alike(table.to_torch(state.params["lora"]), trained, 1e-8)
        for tree, slot in zip(moments, slots, strict=True):
            assert_alike(table.to_torch(tree), {name: optimizer.state[p][slot] for name, p in trained.items()}, 1e-8)

        save_adapters(tmp_path / "ours", state.params["lora"], config, names)
        merged = jax.jit(in_float64(apply))(lora.merge(base, state.params["lora"], config), TOKENS[0])
    fresh = pair()[0].double().eval()
    fresh.load_state_dict({name: torch.tensor(x) for name, x in weights.items()})
    with InFloat64(), torch.no_grad():
        read = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours", autocast_adapter_dtype=False).eval()
        unmerged = logits(read, TOKENS[0])
        np.testing.assert_allclose(merged, unmerged.numpy(), rtol=0, atol=1e-7)
        np.testing.assert_allclose(logits(theirs, TOKENS[0]).numpy(), unmerged.numpy(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(merged, logits(theirs.merge_and_unload(), TOKENS[0]).numpy(), rtol=0, atol=1e-8)


def mean(loss):
    return loss.total / loss.weight


def saved_name(name):
    return name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


def logits(model, tokens):
    return model(torch.tensor(tokens, dtype=torch.int64), use_cache=False).logits


def torch_loss(model, tokens):
    found = logits(model, tokens[:, :-1])
    return torch.nn.functional.cross_entropy(
        found.flatten(0, 1), torch.tensor(tokens[:, 1:], dtype=torch.int64).flatten()
    )


def assert_alike(ours, theirs, bar):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        expected = expected.detach().numpy()
        error = np.linalg.norm(ours[name] - expected) / np.linalg.norm(expected)
        assert error <= bar, f"{name}: {error:.2g}"
