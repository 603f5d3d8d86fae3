"""Ring attention (Liu et al. 2023): keys and values pass from device to device along the mesh axis `sequence`.

Every device keeps its queries and attends to the keys that it holds at the moment; the parts are combined by their
logarithms of sums. In the backward pass the gradients of keys and values travel with them. No device ever holds the
keys of a whole row.

A causal query attends to the keys before it, so that with tokens in order the last device would compute most. Tokens
are therefore exchanged in zigzag order: of 2n chunks, device i computes chunks i and 2n - 1 - i, and every step of the
ring takes every device equally long. They are exchanged within attention, and its output is returned in order: a model
may count positions, shift tokens or return them, so that no other order is correct outside of attention. With a sliding
window tokens stay in order: the work is balanced, and keys pass only as far as the window reaches.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import SEQUENCE, TENSOR, data_parallel_size, sequence_parallel_size
from jaxtrain.distributed.rows import window_sharding
from jaxtrain.models.attention import blockwise, cudnn
from jaxtrain.models.attention.options import Operands, Options
from jaxtrain.models.attention.primitives import FORWARD, is_long

_SERVED = {"mask", "q_segments", "k_segments", "rng"}


class Attention(NamedTuple):
    """An attention in a program: its static options, and its arrays."""

    options: Options
    q: Any
    k: Any
    v: Any
    operands: Operands


def find_attention(eqn: JaxprEqn, args: Sequence[Any]) -> Attention | None:
    """Return the attention that an equation computes; None for every other operation."""
    if eqn.primitive.name != "custom_vjp_call":
        return None
    body = eqn.params["call_jaxpr"].eqns
    if len(body) != 1 or body[0].primitive is not FORWARD:
        return None
    options = dict(body[0].params)
    operands, _ = Operands.joined(options.pop("given"), args[3:])
    return Attention(Options(**options), args[0], args[1], args[2], operands)


def has_kernel(attention: Attention) -> bool:
    """Return whether cuDNN has a kernel for this attention, of whole sequences."""
    return attention.q.dtype in cudnn.LOW and cudnn.is_supported(*attention)


def is_ring(attention: Attention, mesh: Mesh) -> bool:
    """Return whether `ring_attention` computes this attention on a mesh."""
    options, q, k, _, operands = attention
    n, (given, _) = sequence_parallel_size(mesh.shape), operands.split()
    (rows, t), s, chunks = q.shape[:2], k.shape[1], 2 * n if _is_zigzag(options) else n
    divisible = t == s and t % chunks == 0 and rows % data_parallel_size(mesh.shape) == 0
    return is_long(t, s) and divisible and {*given} <= _SERVED


def ring_attention(attention: Attention, mesh: Mesh) -> jax.Array:
    """Compute an attention [B, T, N, V] on a mesh that divides its rows, its tokens and, if they are divisible, heads.

    Dropout masks are those of one device.
    """
    options, q, k, v, operands = attention
    return _Ring(options, mesh, math.gcd(q.shape[2], k.shape[2]), q.shape[1])(q, k, v, operands)


def _is_zigzag(options: Options) -> bool:
    return options.causal and options.window is None


class _Ring:
    """Ring attention with its derivative.

    Args:
      options: What is computed.
      mesh: The mesh.
      heads: A number that the heads of queries and of keys are multiples of.
      length: Number of tokens of a row.
    """

    def __init__(self, options: Options, mesh: Mesh, heads: int, length: int) -> None:
        self._mesh = mesh
        (self._rows,) = window_sharding(mesh, 1).spec
        shards = mesh.shape.get(TENSOR, 1)
        self._head_shards = shards if heads % shards == 0 else 1
        self._heads = TENSOR if self._head_shards > 1 else None
        self._on_device = _OnDevice(options, sequence_parallel_size(mesh.shape), length, self._head_shards)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands) -> jax.Array:
        given, others = operands.split()
        specs = [self._operand_spec(name, x) for name, x in zip(given, others, strict=True)]
        tokens, sums = P(self._rows, SEQUENCE, self._heads), P(self._rows, self._heads, SEQUENCE)
        forward = self._map(
            lambda *arrays: self._on_device.forward(given, *arrays), [*[tokens] * 3, *specs], [*[tokens] * 4, sums]
        )
        backward = self._map(
            lambda *arrays: self._on_device.backward(given, *arrays), [*[tokens] * 5, sums, *specs], [tokens] * 3
        )

        @jax.custom_vjp
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
            return forward(q, k, v, *others)[0]

        def attend_forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
            out, *residuals = forward(*arrays)
            return out, (out, residuals, arrays[3:])

        def attend_backward(saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
            out, (q, k, v, lse), others = saved
            return *backward(q, k, v, out, cotangent.astype(out.dtype), lse, *others), *[None] * len(others)

        attend.defvjp(attend_forward, attend_backward)
        return attend(q, k, v, *others)

    def _map(self, fn: Callable[..., Any], in_specs: Sequence[P], out_specs: Sequence[P]) -> Callable[..., Any]:
        specs: dict[str, Any] = {"in_specs": tuple(in_specs), "out_specs": tuple(out_specs)}
        # Jitted, it keeps its constants: those of a function with its own derivative become arguments, and transforms
        # of jaxprs cannot rebuild its rule then.
        return jax.jit(jax.shard_map(fn, mesh=self._mesh, check_vma=False, **specs))

    def _operand_spec(self, name: str, x: jax.Array) -> P:
        rows = self._rows if x.shape[0] > 1 else None
        if name == "rng":
            return P(rows)
        if name == "mask":  # every device has all keys
            return P(rows, self._heads if x.shape[1] > 1 else None, SEQUENCE if x.shape[2] > 1 else None)
        return P(rows, SEQUENCE)


class _OnDevice:
    """What one device computes."""

    def __init__(self, options: Options, devices: int, length: int, head_shards: int) -> None:
        self.options = options._replace(whole=(length, length))
        self.devices, self.head_shards = devices, head_shards
        self.is_zigzag = _is_zigzag(options)
        self.local = length // devices
        size = self.local // 2 if self.is_zigzag else self.local
        self.blocks = _divisor(size, blockwise.Q_BLOCK), _divisor(size, blockwise.K_BLOCK)
        window = options.window
        self.steps = devices if window is None else min(devices, 1 + -(-(window - 1) // self.local))

    def forward(self, given: tuple[str, ...], q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> Any:
        """Return the output in order; the queries, keys and values in the ring's order; the logarithms."""
        q, k, v = map(self._to_ring, (q, k, v))
        operands = self._operands(given, others)

        def attend(i: Any, carry: Any) -> Any:
            keys, sums = carry
            k, v, segments = keys
            given = self._operands_of(operands, i, segments)
            return keys, _combined(sums, blockwise.forward(self.options, q, k, v, given, blocks=self.blocks))

        def attend_and_pass(i: Any, carry: Any) -> Any:
            keys, sums = attend(i, carry)
            return _pass_on(keys, self.devices), sums

        (b, t, n, _), wide = q.shape, np.promote_types(q.dtype, np.float32)
        sums = jnp.zeros((b, t, n, v.shape[-1]), wide), jnp.full((b, n, t), -jnp.inf, wide)
        carry = (k, v, operands.k_segments), sums
        carry = lax.fori_loop(np.int32(0), np.int32(self.steps - 1), attend_and_pass, carry)
        _, sums = attend(np.int32(self.steps - 1), carry)
        out, lse = sums
        return self._to_order(out.astype(v.dtype)), q, k, v, lse

    def backward(
        self,
        given: tuple[str, ...],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out: jax.Array,
        cotangent: jax.Array,
        lse: jax.Array,
        *others: jax.Array,
    ) -> Any:
        """Return the gradients of queries, keys and values in order."""
        out, cotangent = self._to_ring(out), self._to_ring(cotangent)
        operands = self._operands(given, others)

        def differentiate(i: Any, carry: Any) -> Any:
            keys, of_q, of_keys = carry
            k, v, segments = keys
            saved = self._operands_of(operands, i, segments), out, lse, cotangent
            grads = blockwise.backward(self.options, q, k, v, *saved, blocks=self.blocks)
            return keys, of_q + grads.q, (of_keys[0] + grads.k, of_keys[1] + grads.v)

        def differentiate_and_pass(i: Any, carry: Any) -> Any:
            keys, of_q, of_keys = differentiate(i, carry)
            return _pass_on(keys, self.devices), of_q, _pass_on(of_keys, self.devices)

        of_q, of_k, of_v = (jnp.zeros(x.shape, np.promote_types(x.dtype, np.float32)) for x in (q, k, v))
        carry = (k, v, operands.k_segments), of_q, (of_k, of_v)
        carry = lax.fori_loop(np.int32(0), np.int32(self.steps - 1), differentiate_and_pass, carry)
        _, of_q, of_keys = differentiate(np.int32(self.steps - 1), carry)
        of_k, of_v = _pass_on(of_keys, self.devices, 1 - self.steps)  # to the device that they belong to
        return tuple(self._to_order(g.astype(x.dtype)) for g, x in zip((of_q, of_k, of_v), (q, k, v), strict=True))

    def _operands(self, given: tuple[str, ...], others: Sequence[jax.Array]) -> Operands:
        """Return the operands of this device, in the ring's order."""
        operands, _ = Operands.joined(given, others)
        mask, rng = operands.mask, operands.rng
        if mask is not None and mask.shape[2] > 1:
            mask = self._to_ring(mask.swapaxes(1, 2)).swapaxes(1, 2)
        if rng is not None and self.head_shards > 1:
            # The heads of other devices count as rows: [B, shards, N / shards, T, S].
            row = rng[:, 2] * np.uint32(self.head_shards) + lax.axis_index(TENSOR).astype(np.uint32)
            rng = jnp.concatenate([rng[:, :2], row[:, None]], axis=1)
        segments = [x if x is None else self._to_ring(x) for x in (operands.q_segments, operands.k_segments)]
        return operands._replace(mask=mask, rng=rng, q_segments=segments[0], k_segments=segments[1])

    def _operands_of(self, operands: Operands, i: Any, segments: jax.Array | None) -> Operands:
        """Return the operands for the keys of step i, whose segments are given."""
        here = lax.axis_index(SEQUENCE)
        source = (here - i) % np.int32(self.devices)
        mask = operands.mask
        if mask is not None and mask.shape[3] > 1:
            size = self.local // (2 if self.is_zigzag else 1)
            parts = [lax.dynamic_slice_in_dim(mask, start, size, axis=3) for start in self._starts(source)]
            mask = jnp.concatenate(parts, axis=3)
        return operands._replace(
            mask=mask, k_segments=segments, q_positions=self._positions(here), k_positions=self._positions(source)
        )

    def _starts(self, device: Any) -> list[Any]:
        """Return the position of the first token of every chunk of a device."""
        if not self.is_zigzag:
            return [device * np.int32(self.local)]
        first, size = device, np.int32(self.local // 2)
        last = np.int32(2 * self.devices - 1) - device
        is_even = device % np.int32(2) == 0
        return [jnp.where(is_even, first, last) * size, jnp.where(is_even, last, first) * size]

    def _positions(self, device: Any) -> jax.Array:
        """Return the positions int32 [1, T / n] of the tokens of a device."""
        starts = self._starts(device)
        count = np.arange(self.local // len(starts), dtype=np.int32)
        return jnp.concatenate([start + count for start in starts])[None]

    def _to_ring(self, x: jax.Array) -> jax.Array:
        """Exchange the tokens of [B, T / n, …] so that device i has chunks i and 2n - 1 - i, the even one first."""
        return self._exchanged(x, lambda source, chunk: (source, chunk)) if self.is_zigzag else x

    def _to_order(self, x: jax.Array) -> jax.Array:
        """Undo `_to_ring`."""
        return self._exchanged(x, lambda source, chunk: (chunk, source)) if self.is_zigzag else x

    def _exchanged(self, x: jax.Array, direction: Callable[[int, int], tuple[int, int]]) -> jax.Array:
        # Device i has chunks 2i and 2i + 1 in order; of the even chunks one goes to each device, and of the odd ones.
        holders = [[min(c, 2 * self.devices - 1 - c) for c in range(odd, 2 * self.devices, 2)] for odd in (0, 1)]
        halves = jnp.split(x, 2, axis=1)
        moved = [
            lax.ppermute(half, SEQUENCE, [direction(i, holder) for i, holder in enumerate(of)])
            for half, of in zip(halves, holders, strict=True)
        ]
        return jnp.concatenate(moved, axis=1)


def _pass_on(arrays: Any, devices: int, distance: int = 1) -> Any:
    """Send arrays to the device that is `distance` further along the ring."""
    to = [(i, (i + distance) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, SEQUENCE, to), arrays)


def _combined(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, N, V] and the logarithms [B, N, T] of attention to two disjoint sets of keys."""
    total = jnp.logaddexp(one[1], other[1])
    finite = jnp.where(jnp.isneginf(total), 0, total)  # of a query that attends to no key yet
    out, more = (out * jnp.exp(lse - finite).swapaxes(1, 2)[..., None] for out, lse in (one, other))
    return out + more, total


@functools.cache
def _divisor(size: int, most: int) -> int:
    """Return the largest multiple of 8 up to `most` that divides `size`, so that no block has tokens of two chunks."""
    return max((b for b in range(8, most + 1, 8) if size % b == 0), default=most)
