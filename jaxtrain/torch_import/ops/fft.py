"""Fourier transforms. Arguments and norms are NumPy's, but for the basic ones with underscores."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtrain.torch_import.ops.table import op

for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2"):
    op(f"fft_{_name}.default")(getattr(jnp.fft, _name))
for _name in ("fftn", "ifftn", "rfftn", "irfftn"):
    op(f"fft_{_name}.default")(getattr(jnp.fft, _name))
op("fft_fftshift.default")(jnp.fft.fftshift)
op("fft_ifftshift.default")(jnp.fft.ifftshift)

_NORMS = ("backward", "ortho", "forward")
"""Names of PyTorch's normalizations of a forward transform: none, by the root of n, by n."""


@op("_fft_c2c.default")
def fft_c2c(x: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    """The transform of complex numbers."""
    if forward:
        return jnp.fft.fftn(x, axes=dim, norm=_NORMS[normalization])
    return jnp.fft.ifftn(x, axes=dim, norm=_NORMS[2 - normalization])


@op("_fft_r2c.default")
def fft_r2c(x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    """The transform of real numbers."""
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(x, axes=dim, norm=_NORMS[normalization])


@op("_fft_c2r.default")
def fft_c2r(x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    """The inverse transform to real numbers."""
    sizes = [*(x.shape[i] for i in dim[:-1]), last_dim_size]
    return jnp.fft.irfftn(x, sizes, axes=dim, norm=_NORMS[2 - normalization])
