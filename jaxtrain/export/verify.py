"""Whether what was exported computes what the model does, asked on rows of the run's own validation data.

The answer is in float64: an export may be at most twice as far from it as JAX's own float32 is (root mean square over
all logits), which is the bar of PyTorch's compiler tests, and of `parity`.
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
NOISE = float(np.finfo(np.float32).eps)
"""Below this the distances are rounding alone, and their ratio is chance."""

_BATCHES = (1, 3, 8)


@dataclass(frozen=True)
class Trial:
    """What to give an export, and what is to come back: logits in float64 and in JAX's float32."""

    inputs: Sequence[np.ndarray]
    truth: np.ndarray
    ours: np.ndarray


@dataclass(frozen=True)
class Verification:
    """Distances from float64, relative, root mean square: of the export, and of JAX's float32."""

    batches: Sequence[int]
    theirs: float
    ours: float

    def __str__(self) -> str:
        *most, last = map(str, self.batches)
        sizes = f"{', '.join(most)} and {last}" if most else last
        return f"in batches of {sizes} {self.theirs:.1e} from float64, JAX's float32 {self.ours:.1e}"


def make_trials(inference: Inference) -> list[Trial]:
    """Batches of one, some and all of the rows; every other is of rows cut to half their length.

    What is to come back is taken from the whole rows, all of them at once: a row must not depend on those beside it,
    nor on how its end is filled up.
    """
    rows = len(next(iter(inference.rows.values())))
    whole, half = (_answers(inference, share) for share in (1, 2))
    sizes = sorted({min(size, rows) for size in _BATCHES})
    return [_first(whole if i % 2 == 0 else half, size) for i, size in enumerate(sizes)]


def verify(asked: Sequence[Trial], answers: Iterator[Any], what: str) -> Verification:
    """How far the `answers` are from the truth. Raises `RunFailed` where that is too far."""
    theirs, ours = [], []
    for trial, answer in zip(asked, answers, strict=True):
        got = np.asarray(answer, np.float64)
        if got.shape != trial.truth.shape:
            raise RunFailed(f"{what} gives logits {list(got.shape)}, the model {list(trial.truth.shape)}: not written")
        theirs.append(_distance(got, trial.truth))
        ours.append(_distance(trial.ours, trial.truth))
        bound = BAR * max(ours[-1], NOISE)
        if not theirs[-1] <= bound:
            raise RunFailed(
                f"{what} is {theirs[-1]:.1e} from the logits in float64, in a batch of {len(got)}, and may be "
                f"{bound:.1e} (JAX's float32 is {ours[-1]:.1e}): not written"
            )
    return Verification([len(trial.truth) for trial in asked], max(theirs), max(ours))


def _answers(inference: Inference, share: int) -> Trial:
    """Of rows cut to the first 1 / `share` of their length, and filled up again."""
    cut, full = [], []
    for name, kind in inference.inputs.items():
        row = inference.rows[name]
        short = row if kind.fill is None else row[:, : max(1, row.shape[1] // share)]
        cut.append(short)
        full.append(row if kind.fill is None else _filled(short, row.shape, kind.fill))
    apply = jax.jit(inference.apply)
    with jax.default_matmul_precision("highest"):
        ours = apply(_as(inference.weights, np.float32), *_all_as(full, np.float32))
        with jax.enable_x64(True):
            truth = apply(_as(inference.weights, np.float64), *_all_as(full, np.float64))
    kept = slice(None)
    if inference.follows is not None:
        kept = slice(cut[[*inference.inputs].index(inference.follows)].shape[1])
    return Trial(cut, *(np.asarray(x, np.float64)[:, kept] for x in (truth, ours)))


def _filled(rows: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
    whole = np.full(shape, fill, rows.dtype)
    whole[:, : rows.shape[1]] = rows
    return whole


def _as(weights: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    return dict(zip(weights, _all_as(weights.values(), dtype), strict=True))


def _all_as(arrays: Any, dtype: Any) -> list[Any]:
    return [x.astype(dtype) if jnp.issubdtype(x.dtype, np.floating) else x for x in arrays]


def _first(trial: Trial, rows: int) -> Trial:
    return Trial([x[:rows] for x in trial.inputs], trial.truth[:rows], trial.ours[:rows])


def _distance(found: np.ndarray, truth: np.ndarray) -> float:
    """‖found − truth‖ / ‖truth‖."""
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
