"""In low precision each tensor is judged, not only the whole: a lack of precision in a small one is found."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtrain as jt
from jaxtrain import losses
from jaxtrain.interop import AS_IS, LINEAR, NameTable, TorchParam
from parity import AdamW, Case, check
from parity.bars import FALSE_ALARM, RATIO_BAR, tensor_bar
from parity.compare.verdict import TensorRatio, by_tensor, same_precision
from parity.record import Record, Snapshot

ROWS, WIDTH, CLASSES = 256, 128, 5
NAMES = NameTable(
    {
        "inner/kernel": TorchParam("0.weight", LINEAR),
        "inner/bias": TorchParam("0.bias", AS_IS),
        "norm/scale": TorchParam("1.weight", AS_IS),
        "norm/bias": TorchParam("1.bias", AS_IS),
        "head/kernel": TorchParam("3.weight", LINEAR),
        "head/bias": TorchParam("3.bias", AS_IS),
    }
)
LIKE = {
    "inner": {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)},
    "norm": {"scale": (WIDTH,), "bias": (WIDTH,)},
    "head": {"kernel": (WIDTH, CLASSES), "bias": (CLASSES,)},
}


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def over_rows(x, rows, added):
    return jnp.broadcast_to(x, (rows, *x.shape))


def _added_in_bfloat16(rows, added, _, g):
    return (added(g.astype(jnp.bfloat16)).astype(g.dtype),)


over_rows.defvjp(lambda x, rows, added: (over_rows(x, rows, added), None), _added_in_bfloat16)


def in_order(x):
    return jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros_like(x[0]), x)[0]


def in_pairs(x):
    while len(x) > 32:
        x = x[::2] + x[1::2]
    return in_order(x)


def batch(seed, rows):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, WIDTH)).astype(np.float32), "label": rng.integers(0, CLASSES, rows)}


def case(imprecise=None, added=in_order):
    """The case of a perceptron with a norm; the gradient of one parameter is added over rows in bfloat16."""

    def loss_fn(params, batch, rng):
        def of(path):
            layer, name = path.split("/")
            x, rows = params[layer][name], len(batch["x"])
            return over_rows(x, rows, added) if path == imprecise else x[None]

        x = batch["x"] @ params["inner"]["kernel"] + of("inner/bias")
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * of("norm/scale") + of("norm/bias")
        logits = jnp.tanh(x) @ params["head"]["kernel"] + of("head/bias")
        return jt.Loss.of(losses.cross_entropy(logits, batch["label"])), {}

    def torch_model():
        layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Tanh()
        return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, CLASSES))

    def torch_loss(model, batch):
        found = torch.nn.functional.cross_entropy(model(batch["x"]).float(), batch["label"], reduction="sum")
        return found, len(batch["label"])

    return Case(
        name=f"perceptron {imprecise}",
        torch_model=torch_model,
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like={
            layer: {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in of.items()}
            for layer, of in LIKE.items()
        },
        names=NAMES,
        batch=batch,
        rows=ROWS,
        optimizer=AdamW(1e-3),
        clip_norm=None,
    )


@pytest.mark.parametrize(
    ("path", "precision", "added"),
    [("head/bias", "bf16", in_order), ("norm/bias", "fp16", in_pairs), ("norm/scale", "fp16", in_pairs)],
)
def test_a_small_tensor_whose_gradient_is_added_in_bfloat16_is_found(path, precision, added):
    verdict = check(case(path, added), precision, steps=2)
    worst = verdict.worst_tensor
    assert worst.what == f"gradient of {NAMES.params[path].name}", verdict.tensors
    assert worst.ratio > worst.bar
    assert verdict.error_ratio < 2  # of the whole
    assert verdict.faults == (f"{worst}, over {worst.bar:.2g}",)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_same_network_holds_without_the_fault(precision):
    verdict = check(case(), precision, steps=2)
    assert verdict.passed, verdict.faults
    assert 0 < verdict.worst_tensor.ratio <= 2


def record(**grads):
    snapshot = Snapshot({}, {}, {})
    tensors = {"w": np.ones(1000), "key": np.zeros(4), "b": np.ones(4)} | {k: np.full(4, v) for k, v in grads.items()}
    return Record(np.ones(1), tensors, snapshot, Snapshot({"w": np.ones(1)}, {}, {}), np.ones(2), np.ones(1))


def test_a_gradient_that_is_zero_in_mathematics_is_judged_on_the_scale_of_the_whole():
    theirs = [record(b=1.001, key=1e-9)]
    tensors = same_precision(record(b=1.001, key=1e-6), theirs, record()).tensors
    ratios = {tensor.what: tensor.ratio for tensor in tensors}
    assert ratios["gradient of key"] < 1  # 1000 times PyTorch's, of a whole that is apart by 1e-3 in 4 of 1008 elements
    assert ratios["gradient of b"] == pytest.approx(1)
    assert ratios["gradient of w"] == 0


def test_a_tensor_that_is_imprecise_in_most_trainings_is_a_fault_and_one_in_few_is_not():
    verdict = same_precision(record(), [record()], record())

    def trainings(imprecise, elements):
        ratios = [9.0 if i < imprecise else 1.0 for i in range(5)]
        return [(TensorRatio("a", x, 2.0, elements), TensorRatio("b", 1.5, 2.0, 100)) for x in ratios]

    assert by_tensor(verdict, trainings(2, 100)).passed
    assert by_tensor(verdict, trainings(2, 100)).worst_tensor.what == "b"
    line = "a: 9 times as far from the float64 truth as PyTorch's, over 2"
    assert by_tensor(verdict, trainings(3, 100)).faults == (line,)
    assert by_tensor(verdict, trainings(3, 1)).passed  # single numbers are as far apart by chance


def test_the_bar_of_few_numbers_is_exceeded_by_chance_as_rarely_as_stated():
    rng = np.random.default_rng(0)
    for elements in (1, 3, 8):
        ours, theirs = np.sqrt((rng.standard_normal((2, 200_000, 5, elements)) ** 2).mean(-1))
        over = np.median(ours / theirs, axis=1) > tensor_bar(elements, 5)
        assert over.mean() < 2 * FALSE_ALARM
        assert over.mean() > FALSE_ALARM / 2 or tensor_bar(elements, 5) == RATIO_BAR
