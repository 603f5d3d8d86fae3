"""Every loss against PyTorch's, each after one linear layer of 6 features to 4."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch.nn import functional as F
from transformers.models.clip.modeling_clip import image_text_contrastive_loss

import jaxtrain
from jaxtrain import losses
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from parity.case import AdamW, Batch, Case

ROWS, FEATURES, OUTPUTS, VOCABULARY = 16, 6, 4, 24
CLASS_WEIGHT = np.array([0.25, 1.0, 2.0, 4.0], np.float32)

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""From a generator and a number of rows to an array of a batch."""


def cross_entropy() -> Case:
    """Return cross-entropy with a quarter of the labels ignored."""
    return _labelled("cross-entropy", 0.7, F.cross_entropy, losses.cross_entropy)


def cross_entropy_weighted() -> Case:
    """Return cross-entropy with label smoothing and class weights, which divide the sum."""
    return _labelled(
        "cross-entropy-weighted", 1.0, F.cross_entropy, losses.cross_entropy, CLASS_WEIGHT, label_smoothing=0.1
    )


def nll() -> Case:
    """Return negative log-likelihood of log-softmax with class weights."""
    return _labelled(
        "nll",
        1.1,
        lambda x, y, **options: F.nll_loss(x.log_softmax(1), y, **options),
        lambda x, y, **options: losses.nll(jax.nn.log_softmax(x), y, **options),
        CLASS_WEIGHT,
    )


def mse() -> Case:
    """Return squared error."""
    return _elementwise("mse", 0.9, F.mse_loss, losses.mse, _normal)


def l1() -> Case:
    """Return absolute error."""
    return _elementwise("l1", 0.35, F.l1_loss, losses.l1, _normal)


def smooth_l1() -> Case:
    """Return smooth L1 with β = ½."""
    return _elementwise("smooth-l1", 0.3, F.smooth_l1_loss, losses.smooth_l1, _normal, beta=0.5)


def huber() -> Case:
    """Return Huber loss with δ = ½."""
    return _elementwise("huber", 0.15, F.huber_loss, losses.huber, _normal, delta=0.5)


def binary_cross_entropy() -> Case:
    """Return binary cross-entropy with logits and a weight of positives per class."""
    weight = CLASS_WEIGHT
    return _elementwise(
        "binary-cross-entropy",
        0.4,
        lambda x, t, **given: F.binary_cross_entropy_with_logits(x, t, pos_weight=x.new_tensor(weight), **given),
        lambda x, t: losses.binary_cross_entropy_with_logits(x, t, pos_weight=weight),
        lambda rng, rows: rng.random((rows, OUTPUTS), np.float32),
    )


def kl_div() -> Case:
    """Return the divergence of log-softmax from given probabilities."""
    return _elementwise(
        "kl-div",
        0.1,
        lambda x, t, **options: F.kl_div(x.log_softmax(1), t, **options),
        lambda x, t: losses.kl_div(jax.nn.log_softmax(x), t),
        lambda rng, rows: rng.dirichlet(np.ones(OUTPUTS), rows).astype(np.float32),
    )


def hinge_embedding() -> Case:
    """Return hinge embedding loss with the outputs as distances."""
    return _elementwise(
        "hinge-embedding",
        0.33,
        F.hinge_embedding_loss,
        losses.hinge_embedding,
        lambda rng, rows: rng.choice(np.array([-1, 1]), (rows, OUTPUTS)),
        margin=0.5,
    )


def cosine_embedding() -> Case:
    """Return cosine embedding loss of pairs, half of them dissimilar."""
    return _embeddings(
        "cosine-embedding",
        0.75,
        lambda a, b, _, y: F.cosine_embedding_loss(a, b, y, margin=0.2, reduction="sum"),
        lambda a, b, _, y: losses.cosine_embedding(a, b, y, margin=0.2),
    )


def triplet_margin() -> Case:
    """Return triplet margin loss with the negative's distance to the nearer of the others; some triplets have none."""
    return _embeddings(
        "triplet-margin",
        0.8,
        lambda a, b, c, _: F.triplet_margin_loss(a, b, c, margin=0.1, swap=True, reduction="sum"),
        lambda a, b, c, _: losses.triplet_margin(a, b, c, margin=0.1, swap=True),
    )


def clip() -> Case:
    """Return `transformers`' contrastive loss of the pairs of a micro-batch."""
    return _embeddings(
        "clip",
        0.6,
        lambda a, b, _, __: image_text_contrastive_loss(a @ b.T) * len(a),
        lambda a, b, _, __: losses.clip(a @ b.T),
    )


def chunked_cross_entropy() -> Case:
    """Return chunked cross-entropy after a projection to a vocabulary, with the logits of at most 3 rows at a time."""

    def theirs(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        labels = batch["label"]
        return F.cross_entropy(model(batch["x"]), labels, reduction="sum"), int((labels >= 0).sum())

    def ours(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        del rng
        labels = batch["label"]
        lost = losses.chunked_cross_entropy(_linear(params["layer"], batch["x"]), params["head"], labels, chunk=3)
        return jaxtrain.Loss(lost.sum(), losses.label_weights(labels).sum()), {}

    layer = {f"layer/{path}": TorchParam(f"0.{param.name}", param.layout) for path, param in _NAMES.items()}
    return _case(
        "chunked-cross-entropy",
        0.55,
        theirs,
        ours,
        {"x": _features, "label": lambda rng, rows: _labels(rng, rows, VOCABULARY)},
        torch_model=lambda: Sequential(Linear(FEATURES, OUTPUTS), Linear(OUTPUTS, VOCABULARY, bias=False)),
        params_like={"layer": _LIKE, "head": jax.ShapeDtypeStruct((OUTPUTS, VOCABULARY), np.float32)},
        names=NameTable({**layer, "head": TorchParam("1.weight", LINEAR)}),
    )


_LIKE = {
    "kernel": jax.ShapeDtypeStruct((FEATURES, OUTPUTS), np.float32),
    "bias": jax.ShapeDtypeStruct((OUTPUTS,), np.float32),
}
_NAMES = {"kernel": TorchParam("weight", LINEAR), "bias": TorchParam("bias")}


def _labelled(
    name: str,
    clip_norm: float,
    theirs: Callable[..., Tensor],
    ours: Callable[..., jax.Array],
    class_weight: np.ndarray | None = None,
    **options: Any,
) -> Case:
    """A loss of integer labels, divided by their weights."""

    def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        x, y = model(batch["x"]), batch["label"]
        weight = torch.ones(OUTPUTS) if class_weight is None else torch.from_numpy(class_weight)
        total = theirs(x, y, weight=None if class_weight is None else weight.to(x.dtype), reduction="sum", **options)
        return total, weight[y[y >= 0]].sum().item()

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        del rng
        x, y = _linear(params, batch["x"]), batch["label"]
        lost = ours(x, y, class_weight=class_weight, **options)
        return jaxtrain.Loss(lost.sum(), losses.label_weights(y, class_weight=class_weight).sum()), {}

    return _case(name, clip_norm, torch_loss, loss_fn, {"x": _features, "label": _labels})


def _elementwise(
    name: str,
    clip_norm: float,
    theirs: Callable[..., Tensor],
    ours: Callable[..., jax.Array],
    targets: Draw,
    **options: Any,
) -> Case:
    """A loss of every output and its target."""

    def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return theirs(model(batch["x"]), batch["target"], reduction="sum", **options), batch["target"].numel()

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        del rng
        lost = ours(_linear(params, batch["x"]), batch["target"], **options)
        return jaxtrain.Loss(lost.sum(), weight=lost.size), {}

    return _case(name, clip_norm, torch_loss, loss_fn, {"x": _features, "target": targets})


def _embeddings(name: str, clip_norm: float, theirs: Callable[..., Tensor], ours: Callable[..., jax.Array]) -> Case:
    """A loss of three embeddings per row, with tanh after the layer, and of a sign."""
    inputs = ("a", "b", "c")

    def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return theirs(*(model(batch[x]).tanh() for x in inputs), batch["sign"]), len(batch["sign"])

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        del rng
        lost = ours(*(jnp.tanh(_linear(params, batch[x])) for x in inputs), batch["sign"])
        return jaxtrain.Loss(lost.sum(), weight=len(lost)), {}

    draws = {**dict.fromkeys(inputs, _features), "sign": lambda rng, rows: rng.choice(np.array([-1, 1]), rows)}
    return _case(name, clip_norm, torch_loss, loss_fn, draws)


def _case(name: str, clip_norm: float, torch_loss: Any, loss_fn: Any, draws: Mapping[str, Draw], **model: Any) -> Case:
    def batch(seed: int, rows: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {key: draw(rng, rows) for key, draw in draws.items()}

    layer = {"torch_model": lambda: Linear(FEATURES, OUTPUTS), "params_like": _LIKE, "names": NameTable(_NAMES)}
    return Case(
        name=f"losses.{name}",
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        batch=batch,
        rows=ROWS,
        optimizer=AdamW(lr=1e-2, eps=1e-5, weight_decay=0.1),
        clip_norm=clip_norm,
        **{**layer, **model},
    )


def _linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"][None]


def _features(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.standard_normal((rows, FEATURES), np.float32)


def _normal(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.standard_normal((rows, OUTPUTS), np.float32)


def _labels(rng: np.random.Generator, rows: int, classes: int = OUTPUTS) -> np.ndarray:
    """Labels of the same three classes in each four rows, one of them ignored, so that micro-batches have equal
    weights."""
    return rng.permuted(np.tile([0, classes // 2, classes - 1, -100], (rows // 4, 1)), axis=1).reshape(-1)
