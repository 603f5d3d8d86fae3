"""What one device of a ring computes: attention to the keys that it holds, step by step.

A device attends from one chunk of its queries to one chunk of keys at a time, by the primitives of attention. A GPU
whose cuDNN has the kernel therefore calls it for every chunk. The outputs are combined by their logarithms of sums; the
backward pass takes those of all keys. Keys and values for the next step are sent while the device computes, and so are
the gradients of keys and values, which travel with them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.distributed.mesh import SEQUENCE, TENSOR
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.block_arrays import wide
from jaxtrain.models.attention.primitives import BACKWARD, FORWARD

_LARGE = 1e30
"""A logarithm of a sum beside which every weight is 0."""


def is_zigzag(options: Options) -> bool:
    """Return whether device i of n has chunks i and 2n - 1 - i of 2n, instead of chunk i of n."""
    return options.causal and options.window is None


class _Part(NamedTuple):
    """Some of the device's queries and some of the keys that it holds, each a range of tokens in the ring's order.

    Attributes:
      q: Number of the first query.
      k: Number of the first key.
      sizes: Numbers of queries and of keys.
      causal: Whether a query attends only to keys at its own place in the range and before, or by their positions.
      is_reversed: Whether the ranges are taken from last to first.
      is_hidden: Whether no query attends to any key, bool []; None for no.
    """

    q: Any
    k: Any
    sizes: tuple[int, int]
    causal: bool
    is_reversed: bool = False
    is_hidden: Any = None

    def queries(self, x: jax.Array, axis: int) -> jax.Array:
        """Return the part of an array of the device's queries."""
        return self.turned(_range(x, self.q, self.sizes[0], axis), axis)

    def keys(self, x: jax.Array, axis: int, start: Any = None) -> jax.Array:
        """Return the part of an array of the keys that the device holds, or of all keys, of which it is at `start`."""
        return self.turned(_range(x, self.k if start is None else start, self.sizes[1], axis), axis)

    def turned(self, x: jax.Array, *axes: int) -> jax.Array:
        """Reverse the tokens of such a part, if they are."""
        return jnp.flip(x, axes) if self.is_reversed else x


class RingSteps:
    """The computation of one device.

    Arrays of tokens [B, T / n, …] are in the ring's order unless the method says otherwise.

    Args:
      options: What is computed.
      devices: Number of devices of the ring.
      lengths: Numbers of queries and of keys of a row.
      head_shards: Number of devices that the heads are divided over.
    """

    def __init__(self, options: Options, devices: int, lengths: tuple[int, int], head_shards: int) -> None:
        self._options = options._replace(whole=lengths)
        self._devices, self._head_shards = np.int32(devices), head_shards
        self._is_zigzag = is_zigzag(options)
        self._q_size, self._k_size = (n // (devices * (2 if self._is_zigzag else 1)) for n in lengths)
        window = options.window
        self._steps = devices if window is None else min(devices, 1 + -(-(window - 1) // self._k_size))

    def to_ring(self, x: jax.Array) -> jax.Array:
        """Exchange the tokens of [B, T / n, …], which are in order."""
        return self._exchanged(x, from_order=True) if self._is_zigzag else x

    def to_order(self, x: jax.Array) -> jax.Array:
        """Undo `to_ring`."""
        return self._exchanged(x, from_order=False) if self._is_zigzag else x

    def forward(
        self, given: tuple[str, ...], q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T / n, N, V] and the logarithms of sums [B, N, T / n]; the operands are in order."""
        operands = self._operands(given, others)

        def attend(i: Any, keys: jax.Array, sums: Any) -> Any:
            for part in self._parts(i, operands):
                arrays, (names, operands_of_part), options = self._arguments(operands, i, part, q, keys)
                out, lse = FORWARD.bind(*arrays, *operands_of_part, given=names, **options)
                lse = lse[..., 0] if part.is_hidden is None else jnp.where(part.is_hidden, -jnp.inf, lse[..., 0])
                old = [part.queries(x, axis) for x, axis in zip(sums, (1, 2), strict=True)]
                new = zip(sums, _combined(old, (out.astype(old[0].dtype), lse)), (1, 2), strict=True)
                sums = [lax.dynamic_update_slice_in_dim(x, part.turned(y, axis), part.q, axis) for x, y, axis in new]
            return sums

        (b, t, n, _), dtype = q.shape, wide(q)
        sums = [jnp.zeros((b, t, n, v.shape[-1]), dtype), jnp.full((b, n, t), -jnp.inf, dtype)]
        out, lse = self._run(attend, jnp.concatenate([k, v], axis=-1), sums)
        if operands.sinks is not None:
            total = jnp.logaddexp(lse, operands.sinks.astype(lse.dtype)[:, :, None])
            out, lse = out * jnp.exp(lse - total).swapaxes(1, 2)[..., None], total
        return out.astype(v.dtype), lse

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
    ) -> tuple[Any, ...]:
        """Return the gradients of q, k and v in order, and a list of those of bias and sinks on this device.

        The cotangent is in order, and so are the operands.
        """
        cotangent, operands = self.to_ring(cotangent), self._operands(given, others)
        saved = out, lse[..., None], cotangent

        def differentiate(i: Any, keys: jax.Array, grads: Any) -> Any:
            of_q, of_keys, of_bias = grads
            # What the device before has added so far arrives while this one computes.
            of_keys = of_keys if isinstance(i, int) and i == 0 else self._passed_on(of_keys)
            for part in self._parts(i, operands):
                arrays, (names, operands_of_part), options = self._arguments(operands, i, part, q, keys)
                out, lse, cotangent = (part.queries(x, axis) for x, axis in zip(saved, (1, 2, 1), strict=True))
                if part.is_hidden is not None:
                    lse = jnp.where(part.is_hidden, _LARGE, lse)  # all weights are 0
                residuals = out, lse, cotangent
                dq, dk, dv, *dbias = BACKWARD.bind(*arrays, *operands_of_part, *residuals, given=names, **options)
                of_q = _added(of_q, part.turned(dq, 1), {1: part.q})
                of_keys = _added(of_keys, part.turned(jnp.concatenate([dk, dv], axis=-1), 1), {1: part.k})
                if dbias:
                    place = self._place(of_bias, i, part)
                    of_bias = _added(of_bias, part.turned(dbias[0], *place), place)
            return of_q, of_keys, of_bias

        keys = jnp.concatenate([k, v], axis=-1)
        zeros = [jnp.zeros(x.shape, wide(x)) for x in (q, keys)]
        of_bias = None if operands.bias is None else jnp.zeros(operands.bias.shape, wide(operands.bias))
        grads = *zeros, of_bias
        of_q, of_keys, of_bias = self._run(differentiate, keys, grads)
        of_keys = self._passed_on(of_keys, 1 - self._steps)  # to the device that they belong to
        of_k, of_v = of_keys[..., : k.shape[-1]], of_keys[..., k.shape[-1] :]
        in_order = [self.to_order(g.astype(x.dtype)) for g, x in zip((of_q, of_k, of_v), (q, k, v), strict=True)]
        of_operands = []
        if operands.bias is not None:
            of_bias = self._rows_to(of_bias, self.to_order)
            of_operands.append(of_bias.astype(operands.bias.dtype))
        if (sinks := operands.sinks) is not None:
            weighted = jnp.einsum("btnh,btnh->bnt", cotangent.astype(lse.dtype), out.astype(lse.dtype))
            of_sinks = -(jnp.exp(sinks.astype(lse.dtype)[:, :, None] - lse) * weighted).sum(-1)
            of_sinks = of_sinks.sum(0, keepdims=True) if len(sinks) == 1 else of_sinks
            of_operands.append(of_sinks.astype(sinks.dtype))
        return *in_order, of_operands

    def _run(self, compute: Callable[[Any, jax.Array, Any], Any], keys: jax.Array, carry: Any) -> Any:
        """Return `compute(step, keys and values of the step, carry)` of all steps.

        Those of the next step are sent meanwhile, as one array: a GPU overlaps one transfer with one computation.
        """

        def compute_and_pass(i: Any, carry: Any) -> Any:
            keys, results = carry
            return self._passed_on(keys), compute(i, keys, results)

        if self._steps == 1:
            return compute(0, keys, carry)
        last = np.int32(self._steps - 1)
        carry = lax.fori_loop(np.int32(1), last, compute_and_pass, compute_and_pass(0, (keys, carry)))
        return compute(last, *carry)

    def _parts(self, i: Any, operands: Operands) -> list[_Part]:
        """Return what is computed in step i, an int only if it is 0: in zigzag order as much on every device."""
        sizes, zero, window = (self._q_size, self._k_size), np.int32(0), self._options.window
        if self._is_zigzag:
            last = np.int32(self._q_size)
            if isinstance(i, int):
                return [
                    _Part(last, zero, sizes, causal=False),
                    _Part(zero, zero, sizes, causal=True),
                    _Part(last, last, sizes, causal=True),
                ]
            # Both chunks of queries attend to the first chunk of a device before, the second one to both of one after.
            start = jnp.where(self._source(i) < lax.axis_index(SEQUENCE), zero, last)
            return [_Part(last, zero, sizes, causal=False), _Part(start, start, sizes, causal=False)]
        if isinstance(i, int) or window is None or self._compares_positions(i, operands):
            return [_Part(zero, zero, sizes, self._options.causal)]
        # Within the window of the first queries are the last keys of the device before, of later queries fewer: in
        # reverse order this is causal.
        size, is_first = window - 1, self._source(i) > lax.axis_index(SEQUENCE)
        first = np.int32(self._k_size - size)
        return [_Part(zero, first, (size, size), causal=True, is_reversed=True, is_hidden=is_first)]

    def _compares_positions(self, i: Any, operands: Operands) -> bool:
        """Return whether positions decide which keys a query attends to, or which weights are dropped."""
        between_devices = self._options.window is not None and not isinstance(i, int)
        return operands.rng is not None or (between_devices and self._steps > 2)

    def _arguments(self, operands: Operands, i: Any, part: _Part, q: jax.Array, keys: jax.Array) -> Any:
        """Return queries, keys and values of a part, its operands, split, and its options."""
        segments, start = operands.k_segments, self._start_of_keys(i, part)
        own = Operands(
            mask=None if operands.mask is None else self._cut(operands.mask, i, part),
            bias=None if operands.bias is None else self._cut(operands.bias, i, part),
            q_segments=None if operands.q_segments is None else part.queries(operands.q_segments, 1),
            k_segments=None if segments is None else part.keys(segments, 1, start),
            rng=operands.rng,
        )
        if self._compares_positions(i, operands):
            first = self._start(lax.axis_index(SEQUENCE), part.q, self._q_size)
            own = own._replace(
                q_positions=(first + np.arange(part.sizes[0], dtype=np.int32))[None],
                k_positions=(start + np.arange(part.sizes[1], dtype=np.int32))[None],
            )
        keys, width = part.keys(keys, 1), q.shape[-1]
        arrays = part.queries(q, 1), keys[..., :width], keys[..., width:]
        window = self._options.window if part.causal and not part.is_reversed else None
        return arrays, own.split(), self._options._replace(causal=part.causal, window=window)._asdict()

    def _operands(self, given: tuple[str, ...], others: Sequence[jax.Array]) -> Operands:
        """Return the operands of this device, in the ring's order."""
        operands, _ = Operands.joined(given, others)
        rng = operands.rng
        if rng is not None and self._head_shards > 1:
            # The heads of other devices count as rows: [B, shards, N / shards, T, S].
            row = rng[:, 2] * np.uint32(self._head_shards) + lax.axis_index(TENSOR).astype(np.uint32)
            rng = jnp.concatenate([rng[:, :2], row[:, None]], axis=1)
        mask, bias = (None if x is None else self._rows_to(x, self.to_ring) for x in (operands.mask, operands.bias))
        segments = None if operands.q_segments is None else self.to_ring(operands.q_segments)
        return operands._replace(mask=mask, bias=bias, rng=rng, q_segments=segments)

    @staticmethod
    def _rows_to(x: jax.Array, exchange: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Exchange the queries of [1 or B, 1 or N, 1 or T / n, 1 or S]."""
        return exchange(x.swapaxes(1, 2)).swapaxes(1, 2) if x.shape[2] > 1 else x

    def _cut(self, x: jax.Array, i: Any, part: _Part) -> jax.Array:
        """Return the part of a mask or bias [1 or B, 1 or N, 1 or T / n, 1 or S]."""
        place = self._place(x, i, part)
        for axis, start in place.items():
            x = _range(x, start, part.sizes[axis - 2], axis)
        return part.turned(x, *place)

    def _place(self, x: jax.Array, i: Any, part: _Part) -> dict[int, Any]:
        """Return where the part of a mask or bias begins, by axis."""
        starts = {2: part.q, 3: self._start_of_keys(i, part)}
        return {axis: start for axis, start in starts.items() if x.shape[axis] > 1}

    def _start_of_keys(self, i: Any, part: _Part) -> Any:
        return self._start(self._source(i), part.k, self._k_size)

    def _start(self, device: Any, local: Any, chunk: int) -> Any:
        """Return the number in the row of a device's token, which in zigzag order begins a chunk."""
        if not self._is_zigzag:
            return device * np.int32(chunk) + local
        return jnp.where(local == 0, device, 2 * self._devices - 1 - device) * np.int32(chunk)

    def _source(self, i: Any) -> Any:
        """Return the device whose keys this one has in step i."""
        return (lax.axis_index(SEQUENCE) - i) % self._devices

    def _passed_on(self, arrays: Any, distance: int = 1) -> Any:
        """Send arrays to the device that is `distance` further along the ring."""
        n = int(self._devices)
        to = [(i, (i + distance) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, SEQUENCE, to), arrays)

    def _exchanged(self, x: jax.Array, *, from_order: bool) -> jax.Array:
        # Device i has chunks 2i and 2i + 1 in order; of the even chunks one goes to each device, and of the odd ones.
        n = int(self._devices)
        holders = [[min(c, 2 * n - 1 - c) for c in range(odd, 2 * n, 2)] for odd in (0, 1)]
        first, last = jnp.split(x, 2, axis=1)
        first_is_even = lax.axis_index(SEQUENCE) % 2 == 0  # of the chunks in the ring's order
        if not from_order:
            first, last = jnp.where(first_is_even, first, last), jnp.where(first_is_even, last, first)
        moved = [
            lax.ppermute(half, SEQUENCE, [(i, holder) if from_order else (holder, i) for i, holder in enumerate(of)])
            for half, of in zip((first, last), holders, strict=True)
        ]
        if from_order:
            even, odd = moved
            moved = [jnp.where(first_is_even, even, odd), jnp.where(first_is_even, odd, even)]
        return jnp.concatenate(moved, axis=1)


def _range(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    return x if x.shape[axis] == size else lax.dynamic_slice_in_dim(x, start, size, axis)


def _added(x: jax.Array, part: jax.Array, starts: dict[int, Any]) -> jax.Array:
    """Add a part to an array, at these places of its axes."""
    at = [starts.get(axis, np.int32(0)) for axis in range(x.ndim)]
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, at, part.shape) + part.astype(x.dtype), at)


def _combined(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, N, V] and the logarithms [B, N, T] of attention to two disjoint sets of keys."""
    total = jnp.logaddexp(one[1], other[1])
    finite = jnp.where(jnp.isneginf(total), 0, total)  # of a query that attends to no key yet
    out, more = (out * jnp.exp(lse - finite).swapaxes(1, 2)[..., None] for out, lse in (one, other))
    return out + more, total
