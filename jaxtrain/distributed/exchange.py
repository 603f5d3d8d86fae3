"""The exchange of tokens between the devices that have them and the devices that have their experts.

Device d of n has the experts from d · E / n on. Rows sorted by expert are therefore sorted by device too, and what a
device sends for an expert is one slice. The receiver places the slices by expert, and those of an expert by sender. Its
buffer has room for the rows that it receives if every token chooses as many of its experts as possible: no row is ever
dropped. Rows after the last are zero.

GPUs exchange the slices alone, by a ragged all-to-all. XLA has none for CPUs, where each pair of devices exchanges as
many rows as a sender can have for a receiver.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Exchange(NamedTuple):
    """What determines an exchange along a mesh axis, besides the numbers of rows.

    Attributes:
      axis: The mesh axis.
      devices: The number n of its devices.
      rows: The number of rows of each device.
      most: The largest number of rows that a device can have for another.
      on_gpu: Whether the devices are GPUs.
    """

    axis: str
    devices: int
    rows: int
    most: int
    on_gpu: bool

    @property
    def capacity(self) -> int:
        """The number of rows that a device can receive."""
        return self.devices * self.most

    def dispatch(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Send rows [rows, width], sorted by expert, to the devices that have the experts: [capacity, width].

        Args:
          rows: The rows of this device.
          sizes: The number of rows of every device for every expert, int32 [n, E].
        """
        return _dispatch(self, rows, sizes)

    def combine(self, received: jax.Array, sizes: jax.Array) -> jax.Array:
        """Send rows [capacity, width] back to where `dispatch` had them from: [rows, width]."""
        return _combine(self, received, sizes)


class _Slices(NamedTuple):
    """The slices that this device sends, by expert, and those that it receives, by sender and own expert.

    Attributes:
      sent: Sizes of those it sends, int32 [E].
      sent_from: Where they begin among its rows.
      sent_to: Where they begin in the buffers of their receivers.
      received: Sizes of those it receives, int32 [n, E / n].
      received_from: Where they begin among the rows of their senders.
      received_to: Where they begin in its buffer.
    """

    sent: jax.Array
    sent_from: jax.Array
    sent_to: jax.Array
    received: jax.Array
    received_from: jax.Array
    received_to: jax.Array


def _slices(exchange: Exchange, sizes: jax.Array) -> _Slices:
    me, n = lax.axis_index(exchange.axis), exchange.devices
    starts = _before(sizes, 1)
    # In a buffer: after the rows of the receiver's experts before it, and those of the senders before this one.
    totals = sizes.sum(0, dtype=np.int32).reshape(n, -1)
    places = _before(totals, 1).reshape(1, -1) + _before(sizes, 0)

    def own(of_experts: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(of_experts.reshape(n, n, -1), me, 1, keepdims=False)

    def of_this(x: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(x, me, 0, keepdims=False)

    return _Slices(of_this(sizes), of_this(starts), of_this(places), own(sizes), own(starts), own(places))


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """Return the sums of the sizes before each."""
    return jnp.cumsum(sizes, axis, dtype=np.int32) - sizes


def _dispatched(exchange: Exchange, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    slices, buffer = _slices(exchange, sizes), jnp.zeros_like(rows, shape=(exchange.capacity, rows.shape[1]))
    if exchange.on_gpu:
        there = slices.sent_from, slices.sent, slices.sent_to
        return lax.ragged_all_to_all(rows, buffer, *there, slices.received.reshape(-1), axis_name=exchange.axis)
    at_sender, at_receiver = _positions(exchange, slices)
    return _exchanged(exchange, rows, at_sender, buffer, at_receiver)


def _combined(exchange: Exchange, received: jax.Array, sizes: jax.Array) -> jax.Array:
    slices, rows = _slices(exchange, sizes), jnp.zeros_like(received, shape=(exchange.rows, received.shape[1]))
    if exchange.on_gpu:
        return lax.ragged_all_to_all(
            received,
            rows,
            slices.received_to.reshape(-1),
            slices.received.reshape(-1),
            slices.received_from.reshape(-1),
            slices.sent,
            axis_name=exchange.axis,
        )
    at_sender, at_receiver = _positions(exchange, slices)
    return _exchanged(exchange, received, at_receiver, rows, at_sender)


def _positions(exchange: Exchange, slices: _Slices) -> tuple[jax.Array, jax.Array]:
    """Return where the rows of each pair of devices are, int32 [n, most] each; the length of the array for no row.

    The first are those that this device sends, by receiver; the second those that it receives, by sender.
    """
    i = jnp.arange(exchange.most, dtype=np.int32)[None]
    counts = slices.sent.reshape(exchange.devices, -1).sum(1, dtype=np.int32)[:, None]
    starts = slices.sent_from.reshape(exchange.devices, -1)[:, :1]
    sent = jnp.where(i < counts, starts + i, np.int32(exchange.rows))
    begins, sizes, places = (x[..., None] for x in (_before(slices.received, 1), slices.received, slices.received_to))
    is_within = (i[None] >= begins) & (i[None] < begins + sizes)
    received = jnp.where(is_within, places - begins + i[None], np.int32(0)).sum(1, dtype=np.int32)
    return sent, jnp.where(is_within.any(1), received, np.int32(exchange.capacity))


def _exchanged(
    exchange: Exchange, source: jax.Array, read: jax.Array, target: jax.Array, write: jax.Array
) -> jax.Array:
    sent = source.at[read].get(mode="clip")
    return target.at[write].set(lax.all_to_all(sent, exchange.axis, 0, 0), mode="drop")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(exchange: Exchange, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    return _dispatched(exchange, rows, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(exchange: Exchange, received: jax.Array, sizes: jax.Array) -> jax.Array:
    return _combined(exchange, received, sizes)


# Each is the transpose of the other: of an all-to-all the transpose is the all-to-all back.
_dispatch.defvjp(
    lambda exchange, rows, sizes: (_dispatched(exchange, rows, sizes), sizes),
    lambda exchange, sizes, cotangent: (_combined(exchange, cotangent, sizes), None),
)
_combine.defvjp(
    lambda exchange, received, sizes: (_combined(exchange, received, sizes), sizes),
    lambda exchange, sizes, cotangent: (_dispatched(exchange, cotangent, sizes), None),
)
