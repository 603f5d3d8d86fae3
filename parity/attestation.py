"""The machine, versions and settings that results may depend on."""

import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = ("jax", "jaxlib", "torch", "transformers", "flax", "optax")


def environment() -> dict[str, Any]:
    """Return the entries that every report contains."""
    import jax

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        **{package: _version(package) for package in PACKAGES},
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "jax_default_matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "jax_enable_x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **_torch_settings(),
    }


def check_matmul_precision(precision: str) -> None:
    """Raise `UserError` if PyTorch is set to compute less exactly than JAX's side of a check.

    >>> check_matmul_precision("fp32")
    """
    import torch

    from jaxtrain.errors import UserError

    found = torch.get_float32_matmul_precision()
    if precision == "fp32" and found != "highest":
        raise UserError(
            f"torch.get_float32_matmul_precision() is {found!r}, while JAX's products are in full float32: "
            "call torch.set_float32_matmul_precision('highest')"
        )


def _torch_settings() -> dict[str, Any]:
    """PyTorch's settings; empty if PyTorch is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return {}
    return {
        "torch_device": "cpu",
        "torch_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch_flush_denormal": bool((torch.tensor(1e-40) * 1.0 == 0).item()),
        "torch_threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
