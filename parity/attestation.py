"""The machine, the versions and the settings that a number may depend on; and which of them both sides must share."""

import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = ("jax", "jaxlib", "torch", "transformers", "flax", "optax")


def environment() -> dict[str, Any]:
    """What every report carries."""
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


def refuse_unlike(precision: str) -> None:
    """Raises `UserError` where PyTorch is set to compute less exactly than JAX's side of a check does.

    >>> refuse_unlike("fp32")
    """
    import torch

    from jaxtrain.errors import UserError

    found = torch.get_float32_matmul_precision()
    if precision == "fp32" and found != "highest":
        raise UserError(
            f"torch.get_float32_matmul_precision() is {found!r}, JAX's products are in full float32: "
            "torch.set_float32_matmul_precision('highest') makes PyTorch's so"
        )


def _torch_settings() -> dict[str, Any]:
    """None of them where PyTorch is not installed, and so was not run."""
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
