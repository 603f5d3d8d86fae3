"""Conventions of operations: what JAX's counterpart of a PyTorch function may compute instead."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.explain.conventions.variants import (
    attended,
    biased_running_var,
    flipped,
    given,
    half_pixel_cubic,
    halved_clamp,
    halved_relu,
    hard_at_bounds,
    leaky_at_zero,
    magnitude,
    momentum_of_old,
    other_correction,
    over_axis,
    quick_gelu,
    reduced,
    running_for_batch,
    same_padding,
    scaled,
    shared_among_ties,
    unbiased_batch_norm,
    unbiased_layer_norm,
    unmasked,
    without_ignoring,
    without_mean,
)
from parity.sides.calls import Arguments, Call


@dataclass(frozen=True)
class OperationConvention:
    """A way in which JAX's counterpart of a PyTorch function may differ.

    Attributes:
      of: Name of PyTorch's function.
      has: What JAX has instead.
      change: The change to make in JAX; "{eps}" stands for PyTorch's argument of that name.
      computes: From PyTorch's function and arguments to the value that JAX computes.
    """

    of: str
    has: str
    change: str
    computes: Callable[[Call, Arguments], Tensor]


TINY = 1e-300
"""In place of 0, which PyTorch's batch norm rejects."""
EPSILONS = (1e-5, 1e-6, 1e-3, 1e-8, 1e-12, 0.0, torch.finfo(torch.float32).eps)
NORMS = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm")
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div")
CROSS = ("cross_entropy", "nll_loss")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
POOLS = ("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d")
ATTENTION = "scaled_dot_product_attention"
OPERATIONS: tuple[OperationConvention, ...] = (
    *(
        OperationConvention(f, f"eps is {e:.3g}", "epsilon={eps}", given(eps=e or TINY))
        for f in NORMS
        for e in EPSILONS
    ),
    OperationConvention("layer_norm", "subtracts no mean (RMSNorm)", "LayerNorm", without_mean),
    OperationConvention("layer_norm", "variance is unbiased", "jnp.var(…, ddof=0)", unbiased_layer_norm),
    OperationConvention("batch_norm", "variance is unbiased", "jnp.var(…, ddof=0)", unbiased_batch_norm),
    OperationConvention(
        "batch_norm", "statistics are the running ones", "use_running_average=False", running_for_batch
    ),
    OperationConvention("batch_norm", "momentum is the old value's weight", "momentum=1 - {momentum}", momentum_of_old),
    OperationConvention(
        "batch_norm", "running variance is biased", "n / (n - 1) times the stored variance", biased_running_var
    ),
    OperationConvention(
        "gelu",
        "is that of torch.nn.functional",
        "none needed, PyTorch's model has a formula of its own",
        lambda call, arguments: call(**arguments),
    ),
    OperationConvention("gelu", "is the tanh approximation", "approximate=False", given(approximate="tanh")),
    OperationConvention("gelu", "is exact", "approximate=True", given(approximate="none")),
    OperationConvention("gelu", "is x·sigmoid(1.702x)", "jax.nn.gelu", quick_gelu),
    *(
        OperationConvention(f, f"runs over axis {axis}", "axis={dim}", over_axis(axis))
        for f in ("softmax", "log_softmax")
        for axis in (-1, 0, 1, 2)
    ),
    *(OperationConvention(f, "padding is SAME", "padding={padding}", same_padding) for f in (*CONVOLUTIONS, *POOLS)),
    *(OperationConvention(f, "padding is 0", "padding={padding}", given(padding=0)) for f in (*CONVOLUTIONS, *POOLS)),
    *(OperationConvention(f, "stride is 1", "strides={stride}, None for the kernel's", given(stride=1)) for f in POOLS),
    *(
        OperationConvention(f, "kernel is mirrored", "kernel[::-1, ::-1], or transpose_kernel=True", flipped)
        for f in (*CONVOLUTIONS, "conv_transpose1d", "conv_transpose2d")
    ),
    *(
        OperationConvention(
            f, f"count_include_pad is {counted}", f"count_include_pad={not counted}", given(count_include_pad=counted)
        )
        for f in ("avg_pool1d", "avg_pool2d")
        for counted in (False, True)
    ),
    *(
        OperationConvention(
            "interpolate", f"antialiasing is {'on' if on else 'off'}", f"antialias={not on}", given(antialias=on)
        )
        for on in (True, False)
    ),
    OperationConvention("interpolate", "cubic has a=-0.5", "a=-0.75, by hand", half_pixel_cubic),
    OperationConvention(
        "interpolate", "nearest is of half pixels", "floor(i · old / new)", given(mode="nearest-exact")
    ),
    *(
        OperationConvention(
            "interpolate", f"align_corners is {on}", f"align_corners={not on}, by hand", given(align_corners=on)
        )
        for on in (False, True)
    ),
    *(
        OperationConvention(f, "divisor is the other: n, or n - 1", "ddof=1 for PyTorch's default", other_correction)
        for f in ("var", "std")
    ),
    *(
        OperationConvention(f, "label_smoothing is 0", "label_smoothing={label_smoothing}", given(label_smoothing=0.0))
        for f in CROSS[:1]
    ),
    *(
        OperationConvention(f, "classes weigh alike", "the weight of each label's class", given(weight=None))
        for f in CROSS
    ),
    *(
        OperationConvention(f, "ignored labels count, as class 0", "where=labels != {ignore_index}", without_ignoring)
        for f in CROSS
    ),
    *(
        OperationConvention(
            f,
            "mean is over ignored labels too",
            "divide by the labels that are not {ignore_index}",
            reduced(lambda x, a: x.mean()),
        )
        for f in CROSS
    ),
    *(
        OperationConvention(f, f"reduction is the {how}", "reduction: {reduction}", given(reduction=how))
        for f in (*CROSS, *LOSSES)
        for how in ("mean", "sum")
    ),
    OperationConvention("kl_div", "divides by rows only", "divide by all elements", given(reduction="batchmean")),
    OperationConvention("mse_loss", "is halved (optax.l2_loss)", "2 * optax.l2_loss", scaled(lambda a: 0.5)),
    OperationConvention(
        "smooth_l1_loss", "is Huber's, not divided by beta", "huber_loss / {beta}", scaled(lambda a: a["beta"])
    ),
    OperationConvention(
        "huber_loss", "is divided by delta (smooth L1)", "{delta} times", scaled(lambda a: 1 / a["delta"])
    ),
    OperationConvention("binary_cross_entropy_with_logits", "has no pos_weight", "pos_weight", given(pos_weight=None)),
    OperationConvention(ATTENTION, "scores are not scaled", "1 / sqrt(head width)", given(scale=1.0)),
    OperationConvention(
        ATTENTION,
        "scores are divided by the width",
        "1 / sqrt(head width)",
        lambda _, a: attended(a, scale=lambda d: 1 / d),
    ),
    OperationConvention(
        ATTENTION, "attends to what is masked", "mask=~mask: True keeps", lambda _, a: attended(a, invert=True)
    ),
    OperationConvention(ATTENTION, "has no mask", "mask, or is_causal=True", unmasked),
    OperationConvention(
        ATTENTION, "mask shows the next position too", "jnp.tril(…, k=0)", lambda _, a: attended(a, diagonal=1)
    ),
    OperationConvention(
        ATTENTION, "softmax runs over the queries", "axis of the keys", lambda _, a: attended(a, axis=-2)
    ),
    OperationConvention(
        ATTENTION, "softmax runs over the heads", "axis of the keys", lambda _, a: attended(a, axis=-3)
    ),
    OperationConvention(
        "embedding", "padding_idx has a gradient", "stop_gradient of row {padding_idx}", given(padding_idx=None)
    ),
    OperationConvention("abs", "slope at 0 is 1", "jaxtrain.losses.subgradients.abs", magnitude),
    OperationConvention("clamp", "slope at its bounds is 1/2", "jaxtrain.losses.subgradients.clamp", halved_clamp),
    *(
        OperationConvention(f, "ties share it", f"jaxtrain.losses.subgradients.{f}", shared_among_ties)
        for f in ("max", "min")
    ),
    OperationConvention("relu", "slope at 0 is 1/2", "jax.nn.relu", halved_relu),
    OperationConvention("leaky_relu", "slope at 0 is 1", "jaxtrain.losses.subgradients.leaky_relu", leaky_at_zero),
    OperationConvention(
        "hardtanh", "slope at its bounds is 1", "jaxtrain.losses.subgradients.hardtanh", hard_at_bounds
    ),
)
"""Tried in this order. In a diagnosis, the text of `has` follows "JAX's"."""
