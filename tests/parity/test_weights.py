"""The proposed table equals the one written by hand, and a wrong table is not proved."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import jaxtrain
from jaxtrain import interop
from jaxtrain.errors import UserError
from jaxtrain.interop import AS_IS, LINEAR, NameTable, TorchParam
from parity import check
from parity.case import AdamW, Case
from parity.cases import CASES
from parity.cases.built_in.mlp_case import case as mlp
from parity.weights import as_source, probe_of, propose, prove, with_tables

WIDTH = 6


class Attention(torch.nn.Module):
    """An attention of ambiguous shapes: q, k, v and o are square, and the scale and bias of a norm have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = torch.nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.behind = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ahead(x)
        scores = self.query(y) @ self.key(y).mT / WIDTH**0.5
        return self.behind(x + self.out(scores.softmax(-1) @ self.value(y)) @ self.mix)


def attention_loss(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
    """The names are uninformative, so that values must decide."""
    del rng

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale[None, None] + bias[None, None]

    p, x = params, batch["x"]
    y = norm(x, p["n0"], p["n1"])
    q, k, v = (y @ p[f"w{i}"] + p[f"b{i}"][None, None] for i in "012")
    z = jax.nn.softmax(q @ k.mT / WIDTH**0.5, -1) @ v @ p["w3"] + p["b3"][None, None]
    out = norm(x + z @ p["w4"], p["n2"], p["n3"])
    return jaxtrain.Loss(jnp.sum(jnp.sin(out * batch["y"])), weight=len(x)), {}


ATTENTION_NAMES = NameTable(
    {
        **{f"w{i}": TorchParam(f"{name}.weight", LINEAR) for i, name in enumerate(("query", "key", "value", "out"))},
        **{f"b{i}": TorchParam(f"{name}.bias") for i, name in enumerate(("query", "key", "value", "out"))},
        "w4": TorchParam("mix"),
        "n0": TorchParam("ahead.weight"),
        "n1": TorchParam("ahead.bias"),
        "n2": TorchParam("behind.weight"),
        "n3": TorchParam("behind.bias"),
    }
)


def attention(names: NameTable | None = None) -> Case:
    square, row = (jax.ShapeDtypeStruct((WIDTH,) * n, np.float32) for n in (2, 1))

    def batch(seed: int, rows: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal((rows, 5, WIDTH), np.float32) for name in "xy"}

    return Case(
        name="attention",
        torch_model=Attention,
        torch_loss=lambda model, batch: ((model(batch["x"]) * batch["y"]).sin().sum(), len(batch["x"])),
        loss_fn=attention_loss,
        params_like={path: square if path.startswith("w") else row for path in ATTENTION_NAMES.params},
        names=names,
        batch=batch,
        rows=4,
        optimizer=AdamW(lr=1e-2, eps=1e-5),
        clip_norm=1.0,
    )


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-bn", "gpt2"])
def test_the_proposal_equals_the_handwritten_table(name: str) -> None:
    written = CASES[name]()
    left_out = dataclasses.replace(written, names=None, buffers=None)
    assert with_tables(left_out).tables == (written.names, written.buffers)


@pytest.mark.parametrize("name", ["gradient-penalty", "maml", "autograd.double-backward"])
def test_other_losses_are_probed_as_well(name: str) -> None:
    written = CASES[name]()
    assert with_tables(dataclasses.replace(written, names=None)).names == written.names


def test_equal_shapes_and_squares_are_distinguished_by_value_alone() -> None:
    proposed = with_tables(attention()).names
    # A key's bias does not affect the loss: it is matched by elimination.
    assert proposed == ATTENTION_NAMES
    by_name = propose(Attention(), attention().params_like)
    assert by_name != ATTENTION_NAMES, "the names are informative"


def test_without_values_the_module_determines_the_layout_of_a_square() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 4), "head": torch.nn.Linear(4, 4, bias=False)})
    square = np.zeros((4, 4))
    assert propose(model, {"embed": {"embedding": square}, "head": {"kernel": square}}) == NameTable(
        {"embed/embedding": TorchParam("embed.weight", AS_IS), "head/kernel": TorchParam("head.weight", LINEAR)}
    )


def test_without_values_names_decide_and_then_the_order() -> None:
    layers = [torch.nn.Linear(3, 3) for _ in range(11)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(3))
    like = {"layers": {str(i): {"kernel": np.zeros((3, 3)), "bias": np.zeros(3)} for i in range(11)}}
    like["norm"] = {"scale": np.zeros(3), "bias": np.zeros(3)}
    names = {path: param.name for path, param in propose(model, like).params.items()}
    assert names == {
        **{f"layers/{i}/kernel": f"{i}.weight" for i in range(11)},
        **{f"layers/{i}/bias": f"{i}.bias" for i in range(11)},
        "norm/scale": "11.weight",
        "norm/bias": "11.bias",
    }


def test_a_proposed_case_is_checked_like_any_other() -> None:
    verdict = check(attention(), steps=3)
    assert verdict.passed, verdict.faults


def test_the_source_of_a_proposal_evaluates_to_its_table() -> None:
    for table in (with_tables(attention()).names, CASES["cnn"]().names, CASES["gpt2"]().names):
        assert eval(as_source(table), vars(interop)) == table


def test_models_that_differ_a_little_are_still_matched() -> None:
    def other(params: Any, batch: Any, rng: Any) -> Any:
        return attention_loss(params, {**batch, "x": batch["x"] * (1 + 1e-4)}, rng)

    proposed = with_tables(dataclasses.replace(attention(), loss_fn=other)).names
    assert proposed == ATTENTION_NAMES


def test_tensors_without_counterpart_are_listed_in_one_line() -> None:
    like = {"kernel": np.zeros((6, 7)), "bias": np.zeros(5), "extra": np.zeros((2, 2))}
    with pytest.raises(UserError) as error:
        propose(torch.nn.Linear(6, 5), like)
    expected = str(error.value)
    assert "\n" not in expected
    for part in ("no tensor for kernel (6, 7)", "no tensor for extra (2, 2)", "no leaf for weight (5, 6)", "NameTable"):
        assert part in expected


def test_the_proof_counts_every_tensor_once() -> None:
    proof = prove(CASES["cnn-bn"]())
    assert (proof.tensors, proof.buffers, proof.leaves, proof.tied) == (6, 3, 9, {})
    assert set(proof.distances) == {p.name for p in CASES["cnn-bn"]().names.params.values()}
    assert max(proof.distances.values()) < 1e-6

    proof = prove(CASES["gpt2"]())
    assert proof.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert (proof.tensors, proof.leaves, len(proof.distances)) == (2 + 2 * 12 + 2 + 1, 16, 2 + 2 * 12 + 2)


def test_the_proof_lists_tensors_that_do_not_change_the_loss() -> None:
    proof = prove(attention(ATTENTION_NAMES))
    assert proof.unproven == ("key.bias",)
    assert len(proof.distances) == 12


def test_weights_that_start_at_zero_do_not_prevent_the_proof() -> None:
    def model() -> torch.nn.Module:
        made = Attention()
        torch.nn.init.zeros_(made.mix)
        return made

    assert prove(dataclasses.replace(attention(ATTENTION_NAMES), torch_model=model)).unproven == ("key.bias",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"w0": TorchParam("query.weight", AS_IS)},
        {"w4": TorchParam("mix", LINEAR)},
        {"w0": ATTENTION_NAMES.params["w1"], "w1": ATTENTION_NAMES.params["w0"]},
        {"n0": ATTENTION_NAMES.params["n1"], "n1": ATTENTION_NAMES.params["n0"]},
        {"b2": ATTENTION_NAMES.params["b0"], "b0": ATTENTION_NAMES.params["b2"]},
    ],
)
def test_a_wrong_table_is_not_proved(wrong: dict[str, TorchParam]) -> None:
    with pytest.raises(UserError, match="the models of attention differ at the same weights"):
        prove(attention(NameTable({**ATTENTION_NAMES.params, **wrong})))


class Filters(torch.nn.Module):
    """Complex factors of the frequencies of a signal, and sums of them, whose imaginary parts start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.linspace(1, 2, 5).to(torch.complex64)) for _ in range(2))
        self.mix = torch.nn.Parameter(torch.linspace(-1, 1, 20).reshape(5, 4).to(torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in (self.a, self.b):
            x = torch.fft.irfft(torch.fft.rfft(x) * w, n=8).tanh()
        return torch.fft.irfft(torch.fft.rfft(x) @ self.mix, n=6)


def filters(change: Any = lambda w: w) -> Case:
    """Two of the parameters have one shape, and one is transposed in JAX."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x = batch["x"]
        for name in "pq":
            x = jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x) * change(params[name])[None], n=8))
        x = jnp.fft.irfft(jnp.fft.rfft(x) @ change(params["r"]).T, n=6)
        return jaxtrain.Loss((x**3).sum(), len(x)), {}

    vector, matrix = (jax.ShapeDtypeStruct(shape, np.complex64) for shape in ((5,), (4, 5)))
    return Case(
        name="filters",
        torch_model=Filters,
        torch_loss=lambda model, batch: ((model(batch["x"]) ** 3).sum(), len(batch["x"])),
        loss_fn=loss_fn,
        params_like={"p": vector, "q": vector, "r": matrix},
        names=None,
        batch=lambda seed, rows: {"x": np.random.default_rng(seed).standard_normal((rows, 8), np.float32)},
        rows=4,
        optimizer=AdamW(lr=1e-2),
        clip_norm=None,
    )


def test_complex_tensors_are_matched_by_value_and_proved_in_both_parts() -> None:
    case = with_tables(filters())
    assert {path: param.name for path, param in case.names.params.items()} == {"p": "a", "q": "b", "r": "mix"}
    assert {*prove(case).distances} == {"a", "b", "mix"}
    verdict = check(case, steps=2)
    assert verdict.passed, verdict.lines
    real = dataclasses.replace(filters(jnp.real), names=case.names)
    with pytest.raises(UserError, match="differ at the same weights"):
        prove(real)


def test_a_tensor_used_twice_is_listed_with_all_other_errors() -> None:
    params = {**ATTENTION_NAMES.params, "w1": ATTENTION_NAMES.params["w0"], "b1": TorchParam("nothing")}
    with pytest.raises(UserError) as error:
        prove(attention(NameTable(params)))
    expected = str(error.value)
    for part in ("used twice query.weight", "missing nothing", "unexpected key.bias", "unexpected key.weight"):
        assert part in expected
    assert "\n" not in expected


def test_a_tensor_used_twice_is_not_proved_in_an_otherwise_correct_table() -> None:
    case = attention(NameTable({**ATTENTION_NAMES.params, "copy": ATTENTION_NAMES.params["w4"]}))
    with pytest.raises(UserError, match=r"used twice mix$"):
        prove(dataclasses.replace(case, params_like={**case.params_like, "copy": case.params_like["w4"]}))


def test_models_that_agree_only_at_the_weights_are_not_proved() -> None:
    """Both models agree at the weights, but not near them."""

    def stopped(params: Any, batch: Any, rng: Any) -> Any:
        # The loss is the same only if the sum of w4 is that of its start.
        loss, metrics = attention_loss(params, batch, rng)
        off = params["w4"] - jnp.asarray(start, params["w4"].dtype)
        return jaxtrain.Loss(loss.total + jnp.sum(off), loss.weight), metrics

    from parity.sides.torch_side import model_of
    from parity.weights.probe import random_weights

    start = random_weights(model_of(attention(ATTENTION_NAMES)), {"mix"})["mix"]
    case = dataclasses.replace(attention(ATTENTION_NAMES), loss_fn=stopped)
    with pytest.raises(UserError, match=r"perturbed alone, these change the losses of attention differently: mix \("):
        prove(case)


def test_probing_applies_no_dropout_and_leaves_the_case_unchanged() -> None:
    case = mlp(dropout=0.5)
    weights = {name: x.numpy() for name, x in torch.nn.Module.state_dict(case.torch_model()).items()}
    params = case.names.to_jax(weights, like=case.params_like)
    with probe_of(case) as probe:
        torch_loss, jax_loss = probe.torch_loss(weights), probe.jax_loss(params, None)
    assert torch_loss == pytest.approx(jax_loss, rel=1e-12)
    batch = case.batch(0, case.rows)
    plain = mlp().torch_model()
    plain.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    logits = plain(torch.from_numpy(batch["image"]))
    expected = F.cross_entropy(logits, torch.from_numpy(batch["label"])).item()
    assert torch_loss == pytest.approx(expected, rel=1e-5)


class Sequence(torch.nn.Module):
    """A convolution over time, then attention, of ambiguous shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(WIDTH, WIDTH, WIDTH, padding=3)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.mT).mT[:, :-1]
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def sequence_loss(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
    """The heads have a separate axis, as in flax."""
    del rng
    p = params
    padded = jnp.pad(batch["x"], ((0, 0), (3, 3), (0, 0)))
    frames = jnp.stack([padded[:, i : i + batch["x"].shape[1]] for i in range(WIDTH)])
    x = jnp.einsum("kbti,kio->bto", frames, p["kernel"]) + p["bias"][None, None]
    q, k, v = (jnp.einsum("bti,ihd->bthd", x, p[n]["kernel"]) + p[n]["bias"][None, None] for n in ("a", "b", "c"))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH / 2) ** 0.5, -1)
    out = jnp.einsum("bhqk,bkhd,hdo->bqo", weights, v, p["d"]["kernel"]) + p["d"]["bias"][None, None]
    return jaxtrain.Loss(jnp.sum(jnp.sin(out * batch["y"])), weight=len(x)), {}


def test_convolutions_over_time_and_heads_with_a_separate_axis_are_proposed_and_proved() -> None:
    projection = {"kernel": np.zeros((WIDTH, 2, WIDTH // 2)), "bias": np.zeros((2, WIDTH // 2))}
    out = {"kernel": np.zeros((2, WIDTH // 2, WIDTH)), "bias": np.zeros(WIDTH)}
    like = {"kernel": np.zeros((WIDTH, WIDTH, WIDTH)), "bias": np.zeros(WIDTH)}
    like |= {"a": projection, "b": projection, "c": projection, "d": out}
    case = dataclasses.replace(
        attention(), torch_model=Sequence, loss_fn=sequence_loss, params_like=like, name="sequence"
    )
    table, _ = with_tables(case).tables
    found = {path: (param.name, param.layout.source) for path, param in table.params.items()}
    assert found.pop("kernel") == ("conv.weight", "CONV")
    assert found.pop("a/kernel") == ("query.weight", "linear_to_heads(2, 3)")
    assert found.pop("d/kernel") == ("out.weight", "linear_from_heads(2, 3)")
    assert found.pop("b/bias") == ("key.bias", "bias_to_heads(2, 3)")
    assert check(case, steps=2).passed
    assert len(prove(case).distances) == 9
