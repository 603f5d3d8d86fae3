"""Where two programs first differ, as a value: the result of `parity.explain.locate` and a part of a verdict."""

from dataclasses import dataclass

Line = tuple[str, int]
"""A file and a line number, counted from 1."""


@dataclass(frozen=True)
class Divergence:
    """The first value that PyTorch computes and JAX does not.

    A backward operation has the module and the line of the forward operation it differentiates.

    Attributes:
      stage: "forward", "backward", "clip", "update" or "buffers".
      step: Training step, counted from 1.
      torch: PyTorch's module and operation, as "module: operation".
      torch_source: File, line number and text of PyTorch's line.
      jax_source: The line of JAX's first equation after the last agreement whose value PyTorch does not compute.
      last_match: The operation before, whose value both programs have.
      parameters: Where the loss agrees, the parameters whose gradients differ, in the order of the backward pass.
      torch_at: File and line number of `torch_source`; None if unknown.
      jax_at: File and line number of `jax_source`; None if unknown.
      position: Place of the value in PyTorch's program, counted from 0.
      torch_built: PyTorch's module with its arguments, and the line that constructs it; empty if it has submodules.
      jax_built: The line that assigns the attribute of `self` that JAX's line uses; empty if there is none.
    """

    stage: str
    step: int
    torch: str
    torch_source: str
    jax_source: str
    last_match: str
    parameters: tuple[str, ...]
    torch_at: Line | None
    jax_at: Line | None
    position: int = 0
    torch_built: str = ""
    jax_built: str = ""
