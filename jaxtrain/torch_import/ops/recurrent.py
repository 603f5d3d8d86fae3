"""Recurrent networks, a scan over time for each layer and direction."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.models.dropout import dropout as drop
from jaxtrain.torch_import.ops.registry import op

Cell = Callable[[Any, jax.Array, jax.Array, Any], tuple[Any, jax.Array]]
"""From (state, input's part of the gates, recurrent weight, recurrent bias or 0) to (new state, output)."""


def _lstm_cell(state: Any, gates: jax.Array, weight: jax.Array, bias: Any) -> tuple[Any, jax.Array]:
    hidden, cell = state
    i, f, g, o = jnp.split(gates + hidden @ weight.T + bias, 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden, cell), hidden


def _gru_cell(hidden: Any, gates: jax.Array, weight: jax.Array, bias: Any) -> tuple[Any, jax.Array]:
    (r, z, n), (hr, hz, hn) = jnp.split(gates, 3, -1), jnp.split(hidden @ weight.T + bias, 3, -1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    hidden = (1 - z) * jnp.tanh(n + r * hn) + z * hidden
    return hidden, hidden


def _plain_cell(activation: Callable[[jax.Array], jax.Array]) -> Cell:
    def cell(hidden: Any, gates: jax.Array, weight: jax.Array, bias: Any) -> tuple[Any, jax.Array]:
        hidden = activation(gates + hidden @ weight.T + bias)
        return hidden, hidden

    return cell


class Options(NamedTuple):
    """The last arguments of PyTorch's recurrent operations."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def _layers(
    cell: Cell, x: jax.Array, initial: Any, weights: Sequence[jax.Array], options: Options, rng: jax.Array | None
) -> tuple[jax.Array, Any]:
    """Run all layers; return the outputs and the last states, stacked over layers and directions."""
    has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    per_run = len(weights) // (num_layers * directions)
    if per_run != (4 if has_biases else 2):
        raise NotImplementedError("projections of an LSTM (proj_size)")
    last = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            w_in, w_hidden, *biases = weights[i * per_run : (i + 1) * per_run]
            b_in, b_hidden = biases or (0, 0)
            state = jax.tree.map(lambda h, i=i: h[i], initial)

            def step(h: Any, t: jax.Array, w: jax.Array = w_hidden, b: Any = b_hidden) -> tuple[Any, jax.Array]:
                return cell(h, t, w, b)

            state, output = lax.scan(step, state, x @ w_in.T + b_in, reverse=direction == 1)
            last.append(state)
            outputs.append(output)
        x = jnp.concatenate(outputs, -1)
        if train and rng is not None and layer < num_layers - 1:
            x = drop(x, dropout, jax.random.fold_in(rng, layer))
    stacked = jax.tree.map(lambda *states: jnp.stack(states), *last)
    return (jnp.swapaxes(x, 0, 1) if batch_first else x), stacked


@op("lstm.input", random=True)
def lstm(
    x: jax.Array, hx: Sequence[jax.Array], params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Long short-term memory (Hochreiter and Schmidhuber 1997)."""
    out, (hidden, cell) = _layers(_lstm_cell, x, tuple(hx), params, Options(*options), rng)
    return out, hidden, cell


@op("gru.input", random=True)
def gru(
    x: jax.Array, hx: jax.Array, params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, Any]:
    """Gated recurrent units (Cho et al. 2014)."""
    return _layers(_gru_cell, x, hx, params, Options(*options), rng)


@op("rnn_tanh.input", random=True)
def rnn_tanh(
    x: jax.Array, hx: jax.Array, params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, Any]:
    """A plain recurrent network with tanh."""
    return _layers(_plain_cell(jnp.tanh), x, hx, params, Options(*options), rng)


@op("rnn_relu.input", random=True)
def rnn_relu(
    x: jax.Array, hx: jax.Array, params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, Any]:
    """A plain recurrent network with ReLU."""
    return _layers(_plain_cell(jax.nn.relu), x, hx, params, Options(*options), rng)
