"""Estimated time table of a training step by a roofline, for traces without operations.

The time of each operation of the jaxpr is estimated by `jaxtrain.cost.roofline`, once per iteration of its loop.
"""

from collections import Counter, defaultdict
from functools import partial

from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.cost import Ceilings, equation_seconds, executed
from jaxtrain.profile.kinds import kind_of_opcodes
from jaxtrain.profile.program_text import ATTENTION
from jaxtrain.profile.trace import Row, Span, table_rows
from jaxtrain.program import operations as op
from jaxtrain.program.hlo import LIBRARIES, short_path
from jaxtrain.program.recorded_values import frames_of

# XLA's opcodes of primitives with another name that are not elementwise.
_OPCODES = {
    op.DOT_GENERAL: "dot",
    "biased_product": "dot",
    "fp8_product": "dot",
    "scaled_product": "dot",
    op.RAGGED_DOT_GENERAL: "dot",
    op.CONV_GENERAL_DILATED: "convolution",
    op.BROADCAST_IN_DIM: "broadcast",
    op.SPLIT: "slice",
    op.SQUEEZE: "reshape",
    op.REV: "reverse",
    op.PSUM: "all-reduce",
    op.PSUM_INVARIANT: "all-reduce",
    op.ALL_GATHER: "all-gather",
    op.ALL_GATHER_INVARIANT: "all-gather",
    op.ALL_TO_ALL: "all-to-all",
    op.REDUCE_SCATTER: "reduce-scatter",
    op.PPERMUTE: "collective-permute",
}


def estimate_table(step: Jaxpr, device: Ceilings, steps: int, top: int = 3) -> list[Row]:
    """Estimate the time of training steps by kind of operation.

    Args:
      step: Jaxpr of the training step.
      device: Throughput of the device.
      steps: Number of steps.
      top: Number of operations per row.

    Returns:
      The rows, longest first; they add up to `steps` times `jaxtrain.cost.estimate_seconds`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxtrain.cost.data_sheets import CPU
      >>> step = jax.make_jaxpr(lambda x: jnp.tanh(x @ x).T)(jnp.ones((512, 512))).jaxpr
      >>> [(row.kind, row.count, row.top[0].name) for row in estimate_table(step, CPU, steps=10)]
      [('matmul', 10, 'dot_general'), ('elementwise', 10, 'tanh'), ('copy', 10, 'transpose')]
    """
    nanoseconds: dict[Span, float] = defaultdict(float)
    counts: Counter[Span] = Counter()
    for eqn, once, times in executed(step, partial(equation_seconds, device=device), steps):
        operation = _span(eqn)
        nanoseconds[operation] += 1e9 * once * times
        counts[operation] += times
    return table_rows(nanoseconds, counts, top)


def _span(eqn: JaxprEqn) -> Span:
    name, frames = op.of(eqn), frames_of(eqn)
    kind = kind_of_opcodes({_OPCODES.get(name, name.replace("_", "-"))})
    functions = {frame.function_name.rpartition(".")[2] for frame in frames}
    if kind in ("matmul", "elementwise") and not ATTENTION.isdisjoint(functions):
        kind = "attention"
    own = (frame for frame in frames if not LIBRARIES.search(frame.file_name))
    line = next((f"{short_path(frame.file_name)}:{frame.line_num}" for frame in own), "")
    return Span(0, 0, name, kind, line)
