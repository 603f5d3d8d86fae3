"""Recurrent networks, a scan over time for each layer and direction."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.models.layers.dropout import dropout as drop
from jaxtrain.torch_import.ops.table import op

Cell = Callable[[Any, jax.Array, jax.Array, Any], tuple[Any, jax.Array]]
"""From (state, input's part of the gates, recurrent weight, recurrent bias or 0) to (new state, output)."""

PROJECTED = (3, 5)
"""Numbers of weights of an LSTM with a projection (proj_size), without and with biases."""


def _lstm_cell(state: Any, gates: jax.Array, weight: jax.Array, bias: Any) -> tuple[Any, jax.Array]:
    hidden, cell = state
    i, f, g, o = jnp.split(gates + hidden @ weight.T + bias, 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden, cell), hidden


def _gru_cell(hidden: Any, gates: jax.Array, weight: jax.Array, bias: Any) -> tuple[Any, jax.Array]:
    (r, z, n), (hr, hz, hn) = jnp.split(gates, 3, -1), jnp.split(hidden @ weight.T + bias, 3, -1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    new = jnp.tanh(n + r * hn)
    # As PyTorch's kernel (aten/src/ATen/native/RNN.cpp), whose three operations are each rounded in low precision.
    hidden = (hidden - new) * z + new
    return hidden, hidden


def _plain_cell(activation: Callable[[jax.Array], jax.Array]) -> Cell:
    def cell(hidden: Any, gates: jax.Array, weight: jax.Array, bias: Any) -> tuple[Any, jax.Array]:
        hidden = activation(gates + hidden @ weight.T + bias)
        return hidden, hidden

    return cell


def _projected(cell: Cell, weight: jax.Array) -> Cell:
    """Return an LSTM's cell whose output is a product."""

    def projected(state: Any, gates: jax.Array, w: jax.Array, bias: Any) -> tuple[Any, jax.Array]:
        (_, memory), output = cell(state, gates, w, bias)
        hidden = output @ weight.T
        return (hidden, memory), hidden

    return projected


class Options(NamedTuple):
    """The last arguments of PyTorch's recurrent operations."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def _layers(
    cell: Cell,
    x: jax.Array,
    initial: Any,
    weights: Sequence[jax.Array],
    options: Options,
    rng: jax.Array | None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Run all layers; return the outputs and the last states, stacked over layers and directions.

    Beyond the length of a sequence its outputs are 0 and its states stay as they are.
    """
    _, num_layers, dropout, train, bidirectional, batch_first = options
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    per_run = len(weights) // (num_layers * directions)
    within = None if lengths is None else (jnp.arange(len(x))[:, None] < lengths)[..., None]
    last = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            w_in, w_hidden, *rest = weights[i * per_run : (i + 1) * per_run]
            run = _projected(cell, rest.pop()) if per_run in PROJECTED else cell
            b_in, b_hidden = rest or (0, 0)
            state = jax.tree.map(lambda h, i=i: h[i], initial)

            def step(
                h: Any, t: tuple[jax.Array, Any], run: Cell = run, w: jax.Array = w_hidden, b: Any = b_hidden
            ) -> tuple[Any, jax.Array]:
                gates, inside = t
                new, output = run(h, gates, w, b)
                if inside is None:
                    return new, output
                return jax.tree.map(lambda n, o: jnp.where(inside, n, o), new, h), jnp.where(inside, output, 0)

            state, output = lax.scan(step, state, (x @ w_in.T + b_in, within), reverse=direction == 1)
            last.append(state)
            outputs.append(output)
        x = jnp.concatenate(outputs, -1)
        if train and rng is not None and layer < num_layers - 1:
            x = drop(x, dropout, jax.random.fold_in(rng, layer))
    stacked = jax.tree.map(lambda *states: jnp.stack(states), *last)
    return (jnp.swapaxes(x, 0, 1) if batch_first else x), stacked


def _drops(*args: Any) -> bool:
    options = Options(*args[-len(Options._fields) :])
    return options.train and options.dropout > 0 and options.num_layers > 1


@op("lstm.input", random=_drops)
def lstm(
    x: jax.Array, hx: Sequence[jax.Array], params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Long short-term memory (Hochreiter and Schmidhuber 1997)."""
    out, (hidden, cell) = _layers(_lstm_cell, x, tuple(hx), params, Options(*options), rng)
    return out, hidden, cell


@op("gru.input", random=_drops)
def gru(
    x: jax.Array, hx: jax.Array, params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, Any]:
    """Gated recurrent units (Cho et al. 2014)."""
    return _layers(_gru_cell, x, hx, params, Options(*options), rng)


@op("rnn_tanh.input", random=_drops)
def rnn_tanh(
    x: jax.Array, hx: jax.Array, params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, Any]:
    """A plain recurrent network with tanh."""
    return _layers(_plain_cell(jnp.tanh), x, hx, params, Options(*options), rng)


@op("rnn_relu.input", random=_drops)
def rnn_relu(
    x: jax.Array, hx: jax.Array, params: Sequence[jax.Array], *options: Any, rng: jax.Array | None
) -> tuple[jax.Array, Any]:
    """A plain recurrent network with ReLU."""
    return _layers(_plain_cell(jax.nn.relu), x, hx, params, Options(*options), rng)


_CELLS = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _plain_cell(jnp.tanh),
    "rnn_relu": _plain_cell(jax.nn.relu),
}


@op("packed_rnn.default", random=_drops, library="jaxtrain")
def packed_rnn(
    kind: str,
    data: jax.Array,
    lengths: jax.Array,
    hx: Sequence[jax.Array],
    params: Sequence[jax.Array],
    *options: Any,
    rng: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """A recurrent network of sequences of lengths [N], in data [time * N, width]."""
    x = data.reshape(-1, len(lengths), data.shape[-1])
    initial = tuple(hx) if kind == "lstm" else hx[0]
    out, last = _layers(_CELLS[kind], x, initial, params, Options(*(*options, False)), rng, lengths)
    return (out.reshape(-1, out.shape[-1]), *(last if kind == "lstm" else (last,)))
