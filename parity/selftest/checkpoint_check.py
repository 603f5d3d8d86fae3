"""Check that a state restored by orbax equals the saved one and continues to the same bits."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.step import TrainState
from parity.selftest.bits import describe_difference, on_host, unlike
from parity.selftest.check_result import CheckResult
from parity.selftest.step_check import fp16_step, perceptron, rows

BEFORE, AFTER = 3, 2
"""Steps before and after the checkpoint."""


def checkpoint() -> Iterator[CheckResult]:
    """Save and restore a state of every kind: fp16, dropout, a moving average, an open accumulation window."""
    step = fp16_step()
    state = step.init(perceptron(), seed=7, streaming=True)
    for i in range(BEFORE):
        state, _ = step.micro(state, rows(i))
    saved = on_host(state)
    restored = round_trip(state)
    back = on_host(restored)
    yield CheckResult("checkpoint, restored", not (lost := unlike(saved, back)), describe_difference(lost, saved))
    for i in range(BEFORE, BEFORE + AFTER):
        state, _ = step.micro(state, rows(i))
        restored, _ = step.micro(restored, rows(i))
    went = on_host(state)
    apart = unlike(went, on_host(restored))
    yield CheckResult(f"checkpoint, {AFTER} steps on", not apart, describe_difference(apart, went))


def round_trip(state: TrainState) -> TrainState:
    """Write a state to a new folder, as a run does, and read it back."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with (
        _muted(logging.getLogger("absl")),  # orbax logs every phase of every save
        tempfile.TemporaryDirectory(prefix="parity-selftest-") as folder,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as orbax,
    ):
        path = Path(folder) / "state"
        orbax.save(path, args=ocp.args.PyTreeSave(state))
        shardings = ocp.checkpoint_utils.construct_restore_args(like)
        found: Any = orbax.restore(path, args=ocp.args.PyTreeRestore(like, shardings))
    return TrainState(*found)


@contextmanager
def _muted(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
