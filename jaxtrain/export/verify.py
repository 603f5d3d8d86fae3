"""Verification that an exported model computes the same logits, on rows of the run's validation data.

The reference is float64. An export may differ from it at most twice as much as JAX's float32 does (root mean square
over all logits), the bar of PyTorch's compiler tests and of `parity`. The errors of a batch with few logits are
arbitrary: each batch is compared with the largest error of JAX in any, on the scale of all logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import RunFailed
from jaxtrain.export.inference import Inference

BAR = 2.0
"""Largest error of an export, as a multiple of the error of JAX in float32."""
NOISE = float(np.finfo(np.float32).eps)
"""Errors below this are rounding, and their ratio is arbitrary."""
ALIKE = 64 * NOISE
"""Bound of the difference from JAX's float32, for a function that computes in float32 whatever its inputs are."""

_BATCHES = (1, 3, 8)


@dataclass(frozen=True)
class Trial:
    """Inputs of an exported model and the expected logits.

    Attributes:
      inputs: The inputs, in the order of `Inference.inputs`.
      truth: Logits in float64.
      ours: Logits that JAX computes in float32, as float64.
      least_bound: An export may differ from the truth by this much, relative to it, whatever the error of JAX.
    """

    inputs: Sequence[np.ndarray]
    truth: np.ndarray
    ours: np.ndarray
    least_bound: float = BAR * NOISE


@dataclass(frozen=True)
class Verification:
    """Relative errors of the logits from float64, root mean square.

    Attributes:
      batches: The batch sizes.
      theirs: Largest error of the export.
      ours: Largest error of JAX in float32.
    """

    batches: Sequence[int]
    theirs: float
    ours: float

    def __str__(self) -> str:
        *most, last = map(str, self.batches)
        sizes = f"{', '.join(most)} and {last}" if most else last
        return f"in batches of {sizes} {self.theirs:.1e} from float64, JAX's float32 {self.ours:.1e}"


def make_trials(inference: Inference) -> list[Trial]:
    """Return trials with one, some and all of the rows; every second one has rows of half the length.

    The expected logits are computed from all rows at once, padded to their full length, because a row must not depend
    on other rows or on padding.
    """
    rows = len(next(iter(inference.rows.values())))
    whole, half = (_trial(inference, share) for share in (1, 2))
    sizes = [rows] if inference.batch is not None else sorted({min(size, rows) for size in _BATCHES})
    return [_first(whole if i % 2 == 0 else half, size) for i, size in enumerate(sizes)]


def verify(trials: Sequence[Trial], outputs: Iterator[Any], what: str) -> Verification:
    """Compare the outputs of an exported model with the expected logits.

    Args:
      trials: The trials.
      outputs: Logits of the export, one array per trial.
      what: Name of the export in messages.

    Returns:
      The largest errors.

    Raises:
      RunFailed: The shapes differ, or an error is larger than `BAR` times that of JAX in float32.
    """
    scale = _rms(np.concatenate([trial.truth.ravel() for trial in trials])) or 1.0
    ours = max(_rms(trial.ours - trial.truth) / scale for trial in trials)
    theirs = []
    for trial, output in zip(trials, outputs, strict=True):
        got = np.asarray(output, np.float64)
        if got.shape != trial.truth.shape:
            raise RunFailed(
                f"{what} returns logits {list(got.shape)} instead of {list(trial.truth.shape)}: not written"
            )
        theirs.append(_rms(got - trial.truth) / scale)
        bound = max(BAR * ours, trial.least_bound)
        if not theirs[-1] <= bound:
            raise RunFailed(
                f"{what} differs from the logits in float64 by {theirs[-1]:.1e} in a batch of {len(got)}; the bound is "
                f"{bound:.1e} (JAX's float32 differs by {ours:.1e}): not written"
            )
    return Verification([len(trial.truth) for trial in trials], max(theirs), ours)


def _trial(inference: Inference, share: int) -> Trial:
    """Return the trial of all rows, truncated to the first 1 / `share` of their length."""
    truncated, padded = [], []
    for name, kind in inference.inputs.items():
        row = inference.rows[name]
        short = row if kind.fill is None else row[:, : max(1, row.shape[1] // share)]
        truncated.append(short)
        padded.append(row if kind.fill is None else _pad(short, row.shape, kind.fill))
    apply = jax.jit(inference.apply)
    with jax.default_matmul_precision("highest"):
        ours = apply(_cast_weights(inference.weights, np.float32), *_cast(padded, np.float32))
        with jax.enable_x64(True):
            truth = apply(_cast_weights(inference.weights, np.float64), *_cast(padded, np.float64))
    if inference.length_input is not None:
        length = truncated[[*inference.inputs].index(inference.length_input)].shape[1]
        truth, ours = truth[:, :length], ours[:, :length]
    bound = BAR * NOISE
    if truth.dtype != np.float64:
        truth, bound = ours, ALIKE
    return Trial(truncated, np.asarray(truth, np.float64), np.asarray(ours, np.float64), bound)


def _pad(rows: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
    padded = np.full(shape, fill, rows.dtype)
    padded[:, : rows.shape[1]] = rows
    return padded


def _cast_weights(weights: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    return dict(zip(weights, _cast(weights.values(), dtype), strict=True))


def _cast(arrays: Any, dtype: Any) -> list[Any]:
    return [x.astype(dtype) if jnp.issubdtype(x.dtype, np.floating) else x for x in arrays]


def _first(trial: Trial, rows: int) -> Trial:
    return Trial([x[:rows] for x in trial.inputs], trial.truth[:rows], trial.ours[:rows], trial.least_bound)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
