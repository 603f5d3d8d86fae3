"""Packed sequences: while a module is traced they stay padded, since their length depends on values.

The longest sequence of a batch must have the full length. The data is [time * N, …]; in place of the batch sizes there
are the lengths, longest first.
"""

from collections.abc import Sequence
from typing import Any

import torch

from jaxtrain.torch_internals import recurrent_kernels

_LIBRARY = torch.library.Library("jaxtrain", "FRAGMENT")
_LIBRARY.define(
    "packed_rnn(str kind, Tensor data, Tensor lengths, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, "
    "float dropout, bool train, bool bidirectional) -> Tensor[]"
)


@torch.library.register_fake("jaxtrain::packed_rnn")
def _shapes(kind: str, data: torch.Tensor, lengths: torch.Tensor, hx: Sequence[torch.Tensor], *_: Any) -> Any:
    hidden, bidirectional = hx[0], _[-1]
    width = hidden.shape[-1] * (2 if bidirectional else 1)
    return [data.new_empty(data.shape[0], width), *(torch.empty_like(h) for h in hx)]


def rnn_of_padded(
    kind: str, data: torch.Tensor, lengths: torch.Tensor, hx: Any, params: Any, *options: Any
) -> list[torch.Tensor]:
    """Compute `packed_rnn` by PyTorch, on packed sequences."""
    padded = data.unflatten(0, (-1, lengths.shape[0]))
    packed, sizes = recurrent_kernels._pack_padded_sequence(padded, lengths, False)
    state = hx if kind == "lstm" else hx[0]
    y, *states = getattr(recurrent_kernels, kind)(packed, sizes, state, params, *options)
    y, _ = recurrent_kernels._pad_packed_sequence(y, sizes, False, 0.0, padded.shape[0])
    return [y.flatten(0, 1), *states]


class Lengths:
    """The lengths of sequences [N], in place of `PackedSequence.batch_sizes`."""

    device = torch.device("cpu")

    def __init__(self, lengths: torch.Tensor, steps: int) -> None:
        self.lengths, self.steps = lengths, steps

    def __getitem__(self, step: int) -> int:
        if step:
            raise NotImplementedError("only the first of batch_sizes is known")
        return self.lengths.shape[0]

    def size(self, axis: int) -> int:
        """Return the number of steps."""
        return self.steps


class _Functions:
    """`torch._VF` with packed sequences."""

    def __getattr__(self, name: str) -> Any:
        return getattr(recurrent_kernels, name)

    def _pack_padded_sequence(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        x = x.transpose(0, 1) if batch_first else x
        return x.flatten(0, 1), Lengths(lengths, x.shape[0])

    def _pad_packed_sequence(
        self, data: torch.Tensor, sizes: Lengths, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = data.unflatten(0, (sizes.steps, -1))
        outside = torch.arange(sizes.steps)[:, None] >= sizes.lengths
        x = x.masked_fill(outside.reshape(*outside.shape, *[1] * (x.ndim - 2)), padding_value)
        if total_length > sizes.steps:
            more = x.new_full((total_length - sizes.steps, *x.shape[1:]), padding_value)
            x = torch.cat([x, more])
        return (x.transpose(0, 1) if batch_first else x), sizes.lengths

    def lstm(self, x: torch.Tensor, *args: Any) -> Any:
        return self._run("lstm", x, *args)

    def gru(self, x: torch.Tensor, *args: Any) -> Any:
        return self._run("gru", x, *args)

    def rnn_tanh(self, x: torch.Tensor, *args: Any) -> Any:
        return self._run("rnn_tanh", x, *args)

    def rnn_relu(self, x: torch.Tensor, *args: Any) -> Any:
        return self._run("rnn_relu", x, *args)

    def _run(self, kind: str, x: torch.Tensor, *args: Any) -> Any:
        if not isinstance(args[0], Lengths):
            return getattr(recurrent_kernels, kind)(x, *args)
        sizes, hx, *options = args
        states = list(hx) if isinstance(hx, tuple | list) else [hx]
        return tuple(torch.ops.jaxtrain.packed_rnn(kind, x, sizes.lengths, states, *options))


PACKED = _Functions()
"""What `_VF` is in PyTorch's recurrent modules while a module is traced."""
