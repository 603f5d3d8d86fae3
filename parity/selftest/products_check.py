"""Check products and convolutions, with their gradients, in each precision.

Each is compared with NumPy's float64 result on the host. The bound applies to the relative error in the Frobenius norm:
the rounding of operands and result to the format, plus sums of K terms in float32, whose rounding errors grow like a
random walk, √K units (Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis). It is far below
the error of the next coarser format, so that no format can pass for a finer one.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtrain.passes import policy
from parity.selftest.check_result import CheckResult, within

ROUNDOFF = {"fp32": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative rounding of an operand: half a unit in the last place; a whole unit for tf32, which hardware may truncate;
none for float32, the dtype of the operands."""
DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtype of the result."""
SINGLE = 2.0**-24
FAST_CONVOLUTION = 8
"""Rounding of Winograd's algorithm, which libraries choose for 3×3 kernels, relative to plain sums (Lavin and Gray
2016, Fast Algorithms for Convolutional Neural Networks)."""

Arrays = Mapping[str, np.ndarray]


def products() -> Iterator[CheckResult]:
    """Check a product [256, 512] by [512, 384] and its gradients."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in ((256, 512), (512, 384), (256, 384)))
    wide = [a.astype(np.float64) for a in (x, w, dy)]
    truth = {"result": wide[0] @ wide[1], "gradient of x": wide[2] @ wide[1].T, "gradient of w": wide[0].T @ wide[2]}
    terms = {"result": w.shape[0], "gradient of x": w.shape[1], "gradient of w": x.shape[0]}
    yield from _in_each_precision("product", lambda x, w: x @ w, (x, w, dy), truth, terms)


def convolutions() -> Iterator[CheckResult]:
    """Check a 3×3 convolution of [4, 14, 14, 32] to 64 channels and its gradients."""
    rng = np.random.default_rng(1)
    x, w, dy = (rng.standard_normal(s, np.float32) for s in ((4, 14, 14, 32), (3, 3, 32, 64), (4, 14, 14, 64)))
    truth = convolution_truth(*(a.astype(np.float64) for a in (x, w, dy)))
    size, channels = math.prod(w.shape[:2]), w.shape[2:]
    terms = {
        "result": size * channels[0],
        "gradient of x": size * channels[1],
        "gradient of w": math.prod(x.shape[:3]),
    }
    sums = {what: k * FAST_CONVOLUTION**2 for what, k in terms.items()}
    yield from _in_each_precision("convolution", _convolution, (x, w, dy), truth, sums)


def convolution_truth(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
    """Return result and gradients of x [N, H, W, I], padded to the same size, by w [h, w, I, O], for dy [N, H, W,
    O]."""
    _, rows, columns, _ = x.shape
    height, width = w.shape[:2]
    margin = [(0, 0), (height // 2,) * 2, (width // 2,) * 2, (0, 0)]
    padded = np.pad(x, margin)
    dpadded, dw, y = np.zeros_like(padded), np.zeros_like(w), np.zeros_like(dy)
    for i in range(height):
        for j in range(width):
            window = np.s_[:, i : i + rows, j : j + columns]
            y += padded[window] @ w[i, j]
            dw[i, j] = np.einsum("nhwi,nhwo->io", padded[window], dy)
            dpadded[window] += dy @ w[i, j].T
    inside = np.s_[:, height // 2 : height // 2 + rows, width // 2 : width // 2 + columns]
    return {"result": y, "gradient of x": dpadded[inside], "gradient of w": dw}


def _convolution(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _in_each_precision(
    name: str, operation: Callable[..., Any], given: tuple[np.ndarray, ...], truth: Arrays, terms: Mapping[str, int]
) -> Iterator[CheckResult]:
    for precision, roundoff in ROUNDOFF.items():
        found, dtype = _computed(operation, precision, given)
        # Both operands and the result are rounded independently; the sums are always in float32.
        bounds = {what: math.sqrt(3) * roundoff + math.sqrt(k) * SINGLE for what, k in terms.items()}
        errors = {what: float(np.linalg.norm(found[what] - x) / np.linalg.norm(x)) for what, x in truth.items()}
        worst = max(errors, key=lambda what: _ratio(errors[what], bounds[what]))
        title = f"{name}, {precision}"
        if dtype != DTYPES[precision]:
            yield CheckResult(title, False, f"the result is {dtype}, not {DTYPES[precision]}")
        else:
            yield within(title, errors[worst], bounds[worst], f"relative error of the {worst}")


def _ratio(error: float, bound: float) -> float:
    return error / bound if math.isfinite(error) else math.inf


def _computed(
    operation: Callable[..., Any], precision: str, given: tuple[np.ndarray, ...]
) -> tuple[dict[str, np.ndarray], str]:
    """Result and gradients as float64, and the dtype of the result."""

    @jax.jit
    def computed(x: Any, w: Any, dy: Any) -> Any:
        y, pull = jax.vjp(policy(precision).apply(operation), x, w)
        return y, *pull(dy.astype(y.dtype))

    y, dx, dw = computed(*given)
    values = {"result": y, "gradient of x": dx, "gradient of w": dw}
    return {what: np.asarray(x).astype(np.float64) for what, x in values.items()}, y.dtype.name
