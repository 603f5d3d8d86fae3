"""Moments in 8 bits: wrong tables, blocks and magnitudes. PyTorch's side quantizes by the definition."""

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, optim

from jaxtrain.optim import SIGNED, UNSIGNED, Blockwise, adamw8bit, blockwise_quantization, eight_bit
from parity.mutate.mutant import Mutant, Patch, patched
from tests.parity.mutants.optimizers import LR, trained


class Quantized(optim.AdamW):
    """AdamW whose moments are rounded to the nearest values of the dynamic maps after every step, in blocks of 256."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not a method `step` that calls AdamW's: PyTorch would run the hooks of both.
        self.register_step_post_hook(lambda *_: self.round_moments())

    def round_moments(self) -> None:
        """Round the moments."""
        for of in self.state.values():
            rounded(of["exp_avg"], torch.from_numpy(SIGNED.values), keep_sign=True)
            rounded(of["exp_avg_sq"], torch.from_numpy(UNSIGNED.values))


def rounded(moment: Tensor, values: Tensor, keep_sign: bool = False) -> None:
    """Round a moment in place, block by block (Dettmers et al. 2022, section 2)."""
    for block in moment.view(-1).split(256):
        x = block.float()
        largest = x.abs().max()
        codes = (x[:, None] * (1 / largest) - values).abs().argmin(1)
        if keep_sign:
            codes = torch.where((x < 0) & (values[codes] == 0), codes - 1, codes)
        block.copy_(values[codes] * largest)


def linear_read(moment: Blockwise, values: Any, order: Any = ()) -> jax.Array:
    """The values of equally spaced codes."""
    spaced = (moment.codes.astype(jnp.float32) - 127) / 128 if values.signed else moment.codes.astype(jnp.float32) / 255
    return spaced * moment.absmax.max()


def linear_write(absmax: jax.Array, x: jax.Array, values: Any, order: Any = (), **_: Any) -> Blockwise:
    """The nearest of equally spaced codes."""
    relative = x / absmax.max()
    codes = jnp.round(relative * 128) + 127 if values.signed else jnp.round(relative * 255)
    return Blockwise(jnp.clip(codes, 0, 255).astype(jnp.uint8), absmax)


def linear() -> Any:
    """Both moments in codes that are equally spaced."""
    return mock.patch.multiple(eight_bit, dequantize=linear_read, quantize_by=linear_write)


CASE = partial(trained, partial(Quantized, lr=LR), adamw8bit(LR, min_8bit_size=1))


def mutant(name: str, patch: Patch) -> Mutant:
    """A mutant of the optimizer with moments in 8 bits."""
    return Mutant(name, CASE, CASE, "update", patch=patch)


MUTANTS = [
    mutant("8bit-map-is-linear", linear),
    mutant("8bit-second-moment-by-the-signed-map", lambda: mock.patch.dict(eight_bit._ADAM, nu=SIGNED)),
    mutant("8bit-blocks-of-16", lambda: mock.patch.object(blockwise_quantization, "BLOCK", 16)),
    mutant("8bit-magnitudes-not-updated", patched(eight_bit._maxima, lambda order, moment, x: moment.absmax)),
    mutant(
        "8bit-magnitudes-of-the-last-update",
        patched(
            eight_bit._maxima,
            lambda order, moment, x: jnp.where(moment.absmax > 0, moment.absmax, abs(x).max().astype("float32")),
        ),
    ),
]
