"""Bugs planted in the JAX side of a case are located in their layer and on their line.

The models are defined here, so that the wrong lines are in this file, each marked with the name of its bug.
"""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxtrain
import jaxtrain.step.step
from jaxtrain.losses import cross_entropy
from jaxtrain.step.accumulate import mean_gradient
from parity.bars import RATIO_BAR
from parity.case import Case
from parity.cases import CASES
from parity.cases.built_in import cnn_bn_case, gpt2_case, mlp_case
from parity.compare.activations import activations, first_imprecise
from parity.divergence import Divergence
from parity.explain.locate import locate
from parity.optimizer import Optimizer
from parity.run import check
from tests.parity.test_sides import small

HERE = "tests/parity/test_locate.py"
LAYER = 1


def marked(bug: str) -> str:
    """Return the location and text of the line that ends in `# bug`, as reports print them."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, start=1) if line.endswith(f"# {bug}"))
    return f"{HERE}:{number}: {lines[number - 1].strip()}"


def linear(x: Any, p: Any) -> Any:
    return x @ p["kernel"] + p["bias"]


@jax.custom_vjp
def halved_backward(x: Any) -> Any:
    return x


def halve(_: Any, g: Any) -> tuple[Any]:
    return (g / 2,)


halved_backward.defvjp(lambda x: (x, None), halve)


def norm(x: Any, p: Any, bug: str = "") -> Any:
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    var = jnp.square(centred).sum(-1, keepdims=True) / (x.shape[-1] - (bug == "biased variance"))  # biased variance
    root = jnp.sqrt(var + (1e-6 if bug == "epsilon" else 1e-5))  # epsilon
    return centred / root * p["scale"] + p["bias"]


def attention(x: Any, p: Any, bug: str) -> Any:
    b, t, width = x.shape
    q, k, v = (y.reshape(b, t, 4, -1) for y in jnp.split(linear(x, p["qkv"]), 3, -1))
    scale = 1.0 if bug == "scale" else 1 / math.sqrt(width // 4)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale  # scale
    kept = np.tril(np.ones((t, t), bool), k=1 if bug == "mask" else 0)
    scores = jnp.where(kept, scores, -jnp.inf)  # mask
    weights = jax.nn.softmax(scores, axis=1 if bug == "softmax axis" else -1)  # softmax axis
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, width)


def block(x: Any, p: Any, bug: str) -> Any:
    normed = norm(x, p["ln_1"], bug)
    attended = linear(attention(normed, p, bug), p["attn_proj"])
    x = (normed if bug == "residual" else x) + attended  # residual
    factor = 0 if bug == "unused bias" else 1
    hidden = linear(norm(x, p["ln_2"]), {**p["fc"], "bias": p["fc"]["bias"] * factor})  # unused bias
    if bug == "wrong backward":
        hidden = halved_backward(hidden)  # wrong backward
    hidden = jax.nn.gelu(hidden, approximate=bug != "gelu")  # gelu
    kept = lax.stop_gradient(x) if bug == "stopped gradient" else x
    return kept + linear(hidden, p["mlp_proj"])


def transformer(bug: str) -> Case:
    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        with jax.numpy_rank_promotion("allow"):
            x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
            for i in range(2):
                x = block(x, jax.tree.map(lambda p, i=i: p[i], params["blocks"]), bug if i == LAYER else "")
            head = lax.stop_gradient(params["wte"]) if bug == "stopped head" else params["wte"]
            normed = norm(x, params["ln_f"])
            if bug == "no final norm":
                normed = x + 0 * normed  # no final norm
            logits = normed @ head.T  # stopped head
            if bug == "loss axis":
                logits = logits - jax.nn.logsumexp(logits, 1, keepdims=True)  # loss axis
            losses = cross_entropy(logits, labels)
            total = losses.mean() if bug == "mean for sum" else losses.sum()  # mean for sum
        return jaxtrain.Loss(total, weight=labels.size), {}

    return dataclasses.replace(gpt2_case.case(), loss_fn=loss_fn)


def convolved(bug: str) -> Case:
    """Return the case `cnn-bn` with a bug."""

    def loss_fn(p: Any, batch: Any, rng: Any, state: Any) -> tuple[jaxtrain.Loss, dict[str, Any], Any]:
        with jax.numpy_rank_promotion("allow"):
            conv = partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
            padding = "SAME" if bug == "padding" else "VALID"
            x = conv(batch["image"], p["conv"]["kernel"], (1, 1), padding)[:, :8, :8]  # padding
            x = x + p["conv"]["bias"]
            mean = x.mean((0, 1, 2))
            n = x.size // x.shape[-1]
            centred = x - mean
            var = jnp.square(centred).sum((0, 1, 2)) / (n - (bug == "unbiased"))
            y = centred * lax.rsqrt(var + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"]  # unbiased
            unbiased = var if bug == "running variance" else var * (n / (n - 1))
            new = {
                "mean": 0.9 * state["norm"]["mean"] + 0.1 * mean,
                "var": 0.9 * state["norm"]["var"] + 0.1 * unbiased,  # running variance
                "count": state["norm"]["count"] + 1,
            }
            y = jax.nn.leaky_relu(y) if bug == "leaky" else jax.nn.relu(y)  # leaky
            channels_first = bug == "flatten order"
            flat = (y.transpose(0, 3, 1, 2) if channels_first else y).reshape(len(y), -1)
            logits = flat @ p["head"]["kernel"] + p["head"]["bias"]  # flatten order
            losses = cross_entropy(logits, batch["label"])
        return jaxtrain.Loss(losses.sum(), weight=len(losses)), {}, {"norm": new}

    return dataclasses.replace(cnn_bn_case.case(), loss_fn=loss_fn)


def located(case: Case) -> Divergence:
    found = locate(case)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "autograd.double-backward"),
        # The models of this file, a transformer and a convolution with BatchNorm, are tested below.
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("cnn", "gpt2", "cnn-bn", "gradient-penalty")),
    ],
)
def test_nothing_is_located_in_a_correct_case(name: str) -> None:
    assert locate(CASES[name](), seed=3) is None


@pytest.mark.parametrize("case", [pytest.param(transformer, marks=pytest.mark.nightly), convolved])
def test_nothing_is_located_in_the_models_of_this_file_without_a_bug(case: Any) -> None:
    assert locate(case("")) is None


def test_dropout_masks_are_shared() -> None:
    assert locate(gpt2_case.case(dropout=0.1)) is None
    other_rate = dataclasses.replace(gpt2_case.case(dropout=0.1), torch_model=gpt2_case.case(dropout=0.11).torch_model)
    assert located(other_rate).torch == "transformer.drop: aten.mul"


@pytest.mark.parametrize(
    ("bug", "where"),
    [
        ("biased variance", "transformer.h.1.ln_1: aten.native_layer_norm (aten.var_mean)"),
        pytest.param("epsilon", "transformer.h.1.ln_1: aten.native_layer_norm (aten.add)", marks=pytest.mark.nightly),
        pytest.param("scale", "transformer.h.1.attn: aten.mul", marks=pytest.mark.nightly),
        ("mask", "transformer.h.1.attn: aten.add"),
        pytest.param("softmax axis", "transformer.h.1.attn: aten._safe_softmax", marks=pytest.mark.nightly),
        pytest.param("residual", "transformer.h.1: aten.add", marks=pytest.mark.nightly),
        pytest.param("gelu", "transformer.h.1.mlp.act: aten.pow", marks=pytest.mark.nightly),
        ("loss axis", "loss: aten._log_softmax (aten.amax)"),
        pytest.param("no final norm", "lm_head: aten.mm", marks=pytest.mark.nightly),
        pytest.param(
            *("mean for sum", "loss: aten.div"),
            marks=[pytest.mark.nightly, pytest.mark.filterwarnings("ignore:loss_fn at .* is a mean over")],
        ),
    ],
)
def test_a_wrong_value_is_located_in_its_layer_and_on_its_line(bug: str, where: str) -> None:
    found = located(transformer(bug))
    assert (found.stage, found.step, found.torch, found.jax_source) == ("forward", 1, where, marked(bug))
    assert found.parameters == ()


@pytest.mark.parametrize(
    ("bug", "where", "stage"),
    [
        ("padding", "0: aten.convolution", "forward"),
        # By default, one wrong value of the forward pass in another layout is enough.
        ("unbiased", "1: aten.native_batch_norm (aten.add)", "forward"),
        ("leaky", "2.0: aten.relu", "forward"),
        ("flatten order", "4: aten.addmm", "forward"),
        ("running variance", "1: aten.native_batch_norm (aten.mul)", "buffers"),
    ],
)
def test_a_wrong_layer_in_another_layout_is_located_on_its_line(bug: str, where: str, stage: str) -> None:
    found = located(convolved(bug))
    assert (found.stage, found.torch, found.jax_source) == (stage, where, marked(bug))


def test_a_wrong_gradient_of_correct_values_is_located_with_its_parameters() -> None:
    found = located(transformer("wrong backward"))
    assert (found.stage, found.torch) == ("backward", "transformer.h.1.mlp.c_fc: aten.mm")
    assert found.last_match == "transformer.h.1.mlp.act: aten.add"
    assert found.jax_source == marked("wrong backward")
    assert set(found.parameters[:2]) == {"transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.bias"}
    assert not any("h.1.mlp.c_proj" in name or "ln_f" in name for name in found.parameters)


@pytest.mark.nightly
def test_a_stopped_gradient_is_located_in_its_layer() -> None:
    found = located(transformer("stopped gradient"))
    assert (found.stage, found.torch) == ("backward", "transformer.h.1.ln_2: aten.add")
    assert found.parameters[0].startswith("transformer.h.1.attn.c_proj")


@pytest.mark.parametrize(
    ("bug", "where", "parameter"),
    [
        ("stopped head", "lm_head: aten.mm", "transformer.wte.weight"),
        ("unused bias", "transformer.h.1.mlp.c_fc: aten.sum", "transformer.h.1.mlp.c_fc.bias"),
    ],
)
def test_a_parameter_without_its_gradient_is_located_where_the_model_uses_it(
    bug: str, where: str, parameter: str
) -> None:
    found = located(transformer(bug))
    assert (found.stage, found.torch, found.jax_source) == ("backward", where, marked(bug))
    assert found.parameters == (parameter,)


def test_a_wrong_layer_of_a_library_is_located_where_the_scanned_model_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def flax_layer_norm(features: int, epsilon: float) -> Any:
        return nnx.LayerNorm(features, epsilon=epsilon, use_fast_variance=False, rngs=nnx.Rngs(0))

    monkeypatch.setattr("jaxtrain.models.gpt2.LayerNorm", flax_layer_norm)
    found = located(gpt2_case.case(dataclasses.replace(gpt2_case.CONFIG, layer_norm_epsilon=1e-6)))
    assert found.torch == "transformer.h.0.ln_1: aten.native_layer_norm (aten.add)"
    assert found.torch_source.endswith("hidden_states = self.ln_1(hidden_states)")
    assert found.jax_source.startswith("jaxtrain/models/gpt2.py:")
    assert "self.ln_1(x)" in found.jax_source
    assert found.torch_built.startswith("LayerNorm((32,), eps=1e-05")
    assert "self.ln_1 = nn.LayerNorm(" in found.torch_built
    assert "self.ln_1 = LayerNorm(" in found.jax_built


def test_the_layers_of_a_scanned_model_are_distinguished() -> None:
    case = gpt2_case.case()

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        fc = params["blocks"]["fc"]
        scaled = {**fc, "kernel": fc["kernel"].at[LAYER].multiply(1.1)}  # scaled kernel
        return case.loss_fn({**params, "blocks": {**params["blocks"], "fc": scaled}}, batch, rng)

    found = located(dataclasses.replace(case, loss_fn=loss_fn))
    assert (found.torch, found.jax_source) == ("transformer.h.1.mlp.c_fc: aten.addmm", marked("scaled kernel"))


def updated(case: Case, **wrong: Any) -> Case:
    """Return the case with another hyperparameter in JAX than in PyTorch."""
    right = case.optimizer
    ours = dataclasses.replace(right, **wrong).jax
    return dataclasses.replace(case, optimizer=Optimizer("AdamW", right.torch, ours, right.moments))


@pytest.mark.parametrize(
    ("wrong", "theirs"),
    [
        ({"eps": 1e-4}, "denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)"),
        ({"betas": (0.8, 0.999)}, "exp_avg.lerp_(grad, 1 - device_beta1)"),
        ({"betas": (0.9, 0.9)}, "exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)"),
        ({"weight_decay": 0.01}, "param.mul_(1 - lr * weight_decay)"),
    ],
)
def test_a_wrong_optimizer_is_located_in_its_wrong_term(wrong: dict[str, Any], theirs: str) -> None:
    found = located(updated(mlp_case.case(side=8, hidden=32), **wrong))
    assert (found.stage, found.parameters) == ("update", ())
    assert found.torch_source.startswith("torch/optim/adam")
    assert theirs in found.torch_source
    # optax computes the weight decay; the only line in jaxtrain is its caller.
    caller = "jaxtrain/optim/complex_pairs.py"
    assert found.jax_source.startswith(caller if "weight_decay" in wrong else "jaxtrain/optim/")
    assert "eps" not in wrong or "(root + eps)" in found.jax_source


@pytest.mark.parametrize("bug", ["", "epsilon"])
def test_a_check_that_fails_in_float64_is_located(bug: str) -> None:
    verdict = check(transformer(bug), steps=1, locate=True)
    assert verdict.passed == (not bug)
    assert verdict.first_divergence == (located(transformer(bug)) if bug else None)


def casting_its_head(case: Case) -> Case:
    """Return the case with the last layer's weights rounded to bfloat16."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        head = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params["layers"][1])
        return case.loss_fn({"layers": {**params["layers"], 1: head}}, batch, rng)

    return dataclasses.replace(case, loss_fn=loss_fn)


def test_a_loss_of_precision_is_located_in_its_first_module() -> None:
    verdict = check(casting_its_head(small()), "fp32", steps=1, locate=True)
    found = verdict.first_divergence
    assert found is not None
    assert (found.stage, found.last_match, verdict.unlocated) == ("forward", "2", None)
    assert found.torch.startswith("3: output ")
    assert found.torch.endswith(" times as far from float64 as PyTorch's")
    assert found.jax_source.startswith("jaxtrain/models/mlp.py:")


def test_activations_of_every_layer_are_matched_and_as_precise_as_pytorchs() -> None:
    found = activations(gpt2_case.case(), "bf16")
    assert len(found) == 30
    assert {"transformer.h.0.ln_1", "transformer.h.1.mlp.act", "transformer.ln_f", "lm_head"} <= {
        activation.module for activation in found
    }
    assert all(activation.error_ratio < RATIO_BAR for activation in found)
    assert first_imprecise(found) is None


def test_a_difference_that_also_exists_in_float64_is_located_in_float64() -> None:
    case = small()
    doubled = dataclasses.replace(
        case, loss_fn=lambda p, batch, rng: case.loss_fn(jax.tree.map(lambda x: 1.1 * x, p), batch, rng)
    )
    verdict = check(doubled, "bf16", steps=2, locate=True)
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.torch == "1: aten.addmm"
    assert verdict.stage is not None
    assert verdict.stage.startswith("in fp64 as well: loss: ")


@pytest.mark.parametrize(
    ("precision", "settings", "expected"),
    [
        ("fp64", {"accumulate": 4}, "agrees with accumulate 1: the difference arises only with"),
        ("fp32", {"remat": "full"}, "agrees with remat none: the difference arises only with remat full"),
        ("fp64", {"remat": "full"}, "agrees with remat none: the difference arises only with remat full"),
        # In fp32, accumulation takes the same path as remat.
        ("fp32", {"accumulate": 4}, "agrees with accumulate 1: the difference arises only with"),
    ],
)
def test_a_difference_that_only_accumulation_or_remat_causes_is_reported(
    precision: str, settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def averaged_twice(window: Any) -> Any:
        return jax.tree.map(lambda g: g / 4, mean_gradient(window))

    def with_scaled_params(fn: Any, policy: str, platform: str | None) -> Any:
        del platform
        return fn if policy == "none" else lambda params, *args: fn(jax.tree.map(lambda p: 1.1 * p, params), *args)

    if "accumulate" in settings:
        monkeypatch.setattr(jaxtrain.step.step, "mean_gradient", averaged_twice)
    else:
        monkeypatch.setattr(jaxtrain.step.loss_program, "remat", with_scaled_params)
    verdict = check(small(), precision, steps=2, locate=True, **settings)
    assert not verdict.passed
    assert verdict.first_divergence is None
    assert verdict.unlocated is not None
    assert verdict.unlocated.startswith(expected)
