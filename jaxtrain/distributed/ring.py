"""Ring attention (Liu et al. 2023): keys and values pass from device to device along the mesh axis `sequence`.

Every device keeps its queries and attends to the keys that it holds at the moment (`jaxtrain.distributed.ring_steps`).
No device ever holds the keys of a whole row, or more of a bias than the rows of its own queries.

A causal query attends to the keys before it, so that with tokens in order the last device would compute most. Tokens
are therefore exchanged in zigzag order: of 2n chunks, device i computes chunks i and 2n - 1 - i, and every step of the
ring takes every device equally long. They are exchanged within attention, and its output is returned in order: a model
may count positions, shift tokens or return them, so that no other order is correct outside of attention. With a sliding
window tokens stay in order: the work is balanced, and keys pass only as far as the window reaches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import SEQUENCE, TENSOR, data_parallel_size, sequence_parallel_size
from jaxtrain.distributed.ring_steps import RingSteps, is_zigzag
from jaxtrain.distributed.rows import window_sharding
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.primitives import FORWARD, is_long

_SERVED = {"mask", "bias", "sinks", "q_segments", "k_segments", "rng"}


class Attention(NamedTuple):
    """An attention in a program: its static options, and its arrays."""

    options: Options
    q: Any
    k: Any
    v: Any
    operands: Operands


def is_ring(attention: Attention, mesh: Mesh) -> bool:
    """Return whether `ring_attention` computes this attention on a mesh."""
    options, q, k, _, operands = attention
    n, (given, _) = sequence_parallel_size(mesh.shape), operands.split()
    (rows, t), s, chunks = q.shape[:2], k.shape[1], 2 * n if is_zigzag(options) else n
    divisible = t % chunks == s % chunks == 0 and rows % data_parallel_size(mesh.shape) == 0
    return is_long(t, s) and (t == s or not options.causal) and divisible and {*given} <= _SERVED


def ring_attention(attention: Attention, mesh: Mesh) -> jax.Array:
    """Compute an attention [B, T, N, V] on a mesh that divides its rows, its tokens and, if they are divisible, heads.

    Dropout masks are those of one device.
    """
    options, q, k, v, operands = attention
    return _Ring(options, mesh, math.gcd(q.shape[2], k.shape[2]), (q.shape[1], k.shape[1]))(q, k, v, operands)


class _Ring:
    """Ring attention with its derivative.

    Args:
      options: What is computed.
      mesh: The mesh.
      heads: A number that the heads of queries and of keys are multiples of.
      lengths: Numbers of queries and of keys of a row.
    """

    def __init__(self, options: Options, mesh: Mesh, heads: int, lengths: tuple[int, int]) -> None:
        self._mesh = mesh
        (self._rows,) = window_sharding(mesh, 1).spec
        shards = mesh.shape.get(TENSOR, 1)
        self._head_shards = shards if heads % shards == 0 else 1
        self._heads = TENSOR if self._head_shards > 1 else None
        self._steps = RingSteps(options, sequence_parallel_size(mesh.shape), lengths, self._head_shards)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands) -> jax.Array:
        given, others = operands.split()
        steps, specs = self._steps, [self._operand_spec(name, x) for name, x in zip(given, others, strict=True)]
        differentiable = [given.index(name) for name in operands.differentiable()]
        tokens, sums = P(self._rows, SEQUENCE, self._heads), P(self._rows, self._heads, SEQUENCE)
        to_ring = self._map(lambda *arrays: [steps.to_ring(x) for x in arrays], [tokens] * 3, [tokens] * 3)
        to_order = self._map(steps.to_order, [tokens], tokens)
        forward = self._map(lambda *arrays: steps.forward(given, *arrays), [*[tokens] * 3, *specs], (tokens, sums))

        def of_device(*arrays: jax.Array) -> list[jax.Array]:
            *grads, of_operands = steps.backward(given, *arrays)
            reduced = [self._summed(specs[i], x) for i, x in zip(differentiable, of_operands, strict=True)]
            return [*grads, *reduced]

        backward = self._map(
            of_device, [*[tokens] * 5, sums, *specs], [*[tokens] * 3, *(specs[i] for i in differentiable)]
        )

        @jax.custom_vjp
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
            return attend_forward(q, k, v, *others)[0]

        def attend_forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
            qkv, others = to_ring(*arrays[:3]), arrays[3:]
            # So named, `remat` saves them together with the outputs of products.
            out, lse = (checkpoint_name(x, FORWARD.name) for x in forward(*qkv, *others))
            return to_order(out), (qkv, out, lse, others)

        def attend_backward(saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
            qkv, out, lse, others = saved
            dq, dk, dv, *rest = backward(*qkv, out, cotangent.astype(out.dtype), lse, *others)
            of_operands: list[Any] = [None] * len(others)
            for i, x in zip(differentiable, rest, strict=True):
                of_operands[i] = x
            return dq, dk, dv, *of_operands

        attend.defvjp(attend_forward, attend_backward)
        return attend(q, k, v, *others)

    def _map(self, fn: Callable[..., Any], in_specs: Sequence[P], out_specs: Any) -> Callable[..., Any]:
        specs: dict[str, Any] = {"in_specs": tuple(in_specs), "out_specs": out_specs}
        # Jitted, it keeps its constants: those of a function with its own derivative become arguments, and transforms
        # of jaxprs cannot rebuild its rule then.
        return jax.jit(jax.shard_map(fn, mesh=self._mesh, check_vma=False, **specs))

    def _operand_spec(self, name: str, x: jax.Array) -> P:
        rows = self._rows if x.shape[0] > 1 else None
        if name == "rng":
            return P(rows)
        if name == "sinks":
            return P(rows, self._heads)
        if name in ("mask", "bias"):  # every device has all keys
            return P(rows, self._heads if x.shape[1] > 1 else None, SEQUENCE if x.shape[2] > 1 else None)
        return P(rows, SEQUENCE if name == "q_segments" else None)

    def _summed(self, spec: P, x: jax.Array) -> jax.Array:
        """Sum the gradient of an operand over the devices that share it."""
        axes = [axis for axes in (self._rows, SEQUENCE, self._heads) for axis in _names(axes)]
        shared = tuple(axis for axis in axes if axis not in {name for part in spec for name in _names(part)})
        return jax.lax.psum(x, shared) if shared else x


def _names(axes: Any) -> tuple[str, ...]:
    """Return the names of the mesh axes of one entry of a `PartitionSpec`."""
    return (axes,) if isinstance(axes, str) else axes or ()
