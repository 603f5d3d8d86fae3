"""Peak rates of NVIDIA GPUs, by the exact name that JAX reports as `device_kind`.

From NVIDIA's data sheets and architecture white papers (H100, H200, GH200, A100, L40S, L40, L4, A10, A10G, T4, V100,
HGX B200; "NVIDIA Ada GPU Architecture" and "NVIDIA Ampere GA102" for the GeForce cards): dense products, where a sheet
states them with sparsity half of that, and products of 16 and 8 bits that accumulate in float32.
"""

from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.fields import brief


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of a device.

    Attributes:
      fp32: FLOP/s of dense products of float32 operands in full precision.
      tf32: FLOP/s of dense products of float32 operands in tf32; that of fp32 before Ampere.
      half: FLOP/s of dense products of 16-bit operands.
      bandwidth: Bytes/s of its memory.
      launch_overhead_s: Seconds to start one product.
      fp8: FLOP/s of dense products of 8-bit floating-point operands; None where XLA converts them to 16 bits, which is
        below compute capability 8.9.
    """

    fp32: float
    tf32: float
    half: float
    bandwidth: float
    launch_overhead_s: float = 3e-6
    fp8: float | None = None

    @property
    def eight_bit(self) -> float:
        """FLOP/s of products of 8-bit floating-point operands, converted or not."""
        return self.half if self.fp8 is None else self.fp8

    def of_precision(self, precision: str) -> float:
        """FLOP/s that model FLOPs utilization is over: of 16-bit operands for all precisions but fp32 and tf32.

        In those with products in 8 bits others stay in 16 bits, and over one rate their shares compare with bf16's.

        Example:
          >>> peaks = NVIDIA["NVIDIA H100 80GB HBM3"]
          >>> [peaks.of_precision(name) / 1e12 for name in ("tf32", "bf16", "fp8")]
          [494.0, 989.0, 989.0]
        """
        return {"fp32": self.fp32, "tf32": self.tf32}.get(precision, self.half)


def utilization_note(precision: str) -> str | None:
    """Return what model FLOPs utilization is over where products are in 8 bits; None elsewhere.

    Example:
      >>> utilization_note("bf16") is None
      True
    """
    if not precision.startswith("fp8"):
        return None
    return "MFU is over the peak rate of 16-bit products; those in 8 bits have up to twice that rate"


NVIDIA = {
    "NVIDIA B200": Ceilings(75e12, 1125e12, 2250e12, 8.0e12, fp8=4500e12),
    "NVIDIA GH200 480GB": Ceilings(67e12, 494e12, 989e12, 4.0e12, fp8=1979e12),
    "NVIDIA GH200 144G HBM3e": Ceilings(67e12, 494e12, 989e12, 4.9e12, fp8=1979e12),
    "NVIDIA H200": Ceilings(67e12, 494e12, 989e12, 4.8e12, fp8=1979e12),
    "NVIDIA H200 NVL": Ceilings(60e12, 417e12, 835e12, 4.8e12, fp8=1671e12),
    "NVIDIA H100 80GB HBM3": Ceilings(67e12, 494e12, 989e12, 3.35e12, fp8=1979e12),
    "NVIDIA H100 PCIe": Ceilings(51e12, 378e12, 756e12, 2.0e12, fp8=1513e12),
    "NVIDIA H100 NVL": Ceilings(60e12, 417e12, 835e12, 3.9e12, fp8=1671e12),
    "NVIDIA A100-SXM4-80GB": Ceilings(19.5e12, 156e12, 312e12, 2.039e12),
    "NVIDIA A100-SXM4-40GB": Ceilings(19.5e12, 156e12, 312e12, 1.555e12),
    "NVIDIA A100 80GB PCIe": Ceilings(19.5e12, 156e12, 312e12, 1.935e12),
    "NVIDIA A100-PCIE-40GB": Ceilings(19.5e12, 156e12, 312e12, 1.555e12),
    "NVIDIA L40S": Ceilings(91.6e12, 183e12, 362e12, 0.864e12, fp8=733e12),
    "NVIDIA L40": Ceilings(90.5e12, 90.5e12, 181e12, 0.864e12, fp8=362e12),
    "NVIDIA L4": Ceilings(30.3e12, 60e12, 121e12, 0.3e12, fp8=242e12),
    "NVIDIA A10": Ceilings(31.2e12, 62.5e12, 125e12, 0.6e12),
    "NVIDIA A10G": Ceilings(35e12, 35e12, 70e12, 0.6e12),
    "NVIDIA GeForce RTX 4090": Ceilings(82.6e12, 82.6e12, 165e12, 1.008e12, fp8=330e12),
    "NVIDIA GeForce RTX 3090": Ceilings(35.6e12, 35.6e12, 71e12, 0.936e12),
    "Tesla T4": Ceilings(8.1e12, 8.1e12, 65e12, 0.32e12),
    "Tesla V100-SXM2-32GB": Ceilings(15.7e12, 15.7e12, 125e12, 0.9e12),
    "Tesla V100-SXM2-16GB": Ceilings(15.7e12, 15.7e12, 125e12, 0.9e12),
    "Tesla V100-PCIE-32GB": Ceilings(14e12, 14e12, 112e12, 0.9e12),
    "Tesla V100-PCIE-16GB": Ceilings(14e12, 14e12, 112e12, 0.9e12),
}
CPU = Ceilings(4e11, 4e11, 4e11, 5e10, 2e-5)
"""Two cores: 300 to 445 GFLOP/s and 32 to 49 GB/s were measured; 16-bit products are computed in float32."""

SHORT_NAMES = {
    "B200": "NVIDIA B200",
    "GH200": "NVIDIA GH200 480GB",
    "H200": "NVIDIA H200",
    "H100": "NVIDIA H100 80GB HBM3",
    "A100": "NVIDIA A100-SXM4-80GB",
    "L40S": "NVIDIA L40S",
    "L40": "NVIDIA L40",
    "L4": "NVIDIA L4",
    "A10": "NVIDIA A10",
    "A10G": "NVIDIA A10G",
    "RTX4090": "NVIDIA GeForce RTX 4090",
    "RTX3090": "NVIDIA GeForce RTX 3090",
    "T4": "Tesla T4",
    "V100": "Tesla V100-SXM2-32GB",
}
"""The GPU that a short name means: of the variants of a card, that of NVIDIA's own servers."""

_COMPARISON = NVIDIA[SHORT_NAMES["A100"]]


def known_ceilings(device: Any) -> Ceilings | None:
    """Return the peak rates of a `jax.Device`; None for a GPU that is not listed.

    Example:
      >>> import jax
      >>> known_ceilings(jax.devices("cpu")[0]) == CPU
      True
    """
    return CPU if device.platform == "cpu" else NVIDIA.get(device.device_kind)


def ceilings(device: Any) -> Ceilings:
    """Return peak rates to compare programs on a `jax.Device` by; those of an A100 for a GPU that is not listed."""
    return known_ceilings(device) or _COMPARISON


def find_gpu(device: str) -> tuple[str, Ceilings]:
    """Return the full name and the peak rates of a GPU given by its name or a short one.

    Raises:
      UserError: The GPU is not listed.

    Example:
      >>> find_gpu("h100")[0]
      'NVIDIA H100 80GB HBM3'
    """
    names = {name.casefold(): full for name, full in {**{full: full for full in NVIDIA}, **SHORT_NAMES}.items()}
    found = names.get(device.casefold())
    if found is None:
        raise UserError(f"device {brief(device)} is not known: choose one of {', '.join(SHORT_NAMES)}")
    return found, NVIDIA[found]
