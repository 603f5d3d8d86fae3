"""Fourier transforms. Arguments and norms are NumPy's."""

import jax.numpy as jnp

from jaxtrain.torch_import.ops.registry import op

for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2"):
    op(f"fft_{_name}.default")(getattr(jnp.fft, _name))
for _name in ("fftn", "ifftn", "rfftn", "irfftn"):
    op(f"fft_{_name}.default")(getattr(jnp.fft, _name))
op("fft_fftshift.default")(jnp.fft.fftshift)
op("fft_ifftshift.default")(jnp.fft.ifftshift)
