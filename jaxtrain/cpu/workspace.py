"""Memory that XLA's CPU library allocates while a step runs, which the compiler's memory analysis omits.

Convolutions and sums over rows call a library (YNNPACK), which allocates separate blocks. A convolution copies its
padded input and its kernel, which in the gradient of the weights is as large as the activations. Sums over rows
allocate at most 18 MiB and are not counted. These sizes were measured: the library does not document them.

Products that the library does not take are Eigen's. With several threads it packs blocks of an operand, whose number
depends on the product's shape and on the CPU's caches; they are not counted. The largest measured were 512 rows of the
operand: 16 MiB for [64, 512] x [512, 8192] in float32.
"""

import math
import re

_ITEM = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
_COMPUTATION = re.compile(r"^%?([\w.-]+) \(.*\{$", re.M)
_CALL = re.compile(r"kind=kCustom, calls=%?([\w.-]+),.*__ynn_fusion")
_VALUE = re.compile(r"%?([\w.-]+) = (\w+)\[([\d,]*)\]")
_CONVOLUTION = re.compile(r"\bconvolution\(%?([\w.-]+), %?([\w.-]+)\), window=\{(.*?)\}, dim_labels=(\w+)_")


def cpu_workspace(hlo: str) -> int:
    """Estimate the largest block that XLA's CPU library allocates.

    Args:
      hlo: Text of a compiled program.

    Returns:
      Bytes; 0 for a program that is not for the CPU.
    """
    called = set(_CALL.findall(hlo))
    if not called:
        return 0
    parts = _COMPUTATION.split(hlo)[1:]
    bodies = (body for name, body in zip(parts[::2], parts[1::2], strict=True) if name in called)
    return max(_convolution(body.partition("\n}")[0]) for body in bodies)


def _convolution(body: str) -> int:
    found = _CONVOLUTION.search(body)
    if found is None:
        return 0
    values = _values(body)
    (item, shape), (kernel_item, kernel) = values[found[1]], values[found[2]]
    window = dict(part.split("=") for part in found[3].split())
    axes = sorted(axis for axis in found[4] if axis.isdecimal())
    sizes = [shape[found[4].index(axis)] for axis in axes]
    dilated = [
        (n - 1) * int(d) + 1
        for n, d in zip(sizes, window.get("lhs_dilate", "x".join("1" * len(sizes))).split("x"), strict=True)
    ]
    pads = [sum(map(int, pad.split("_"))) for pad in window.get("pad", "x".join(["0_0"] * len(sizes))).split("x")]
    padded = math.prod(n + pad for n, pad in zip(dilated, pads, strict=True)) * math.prod(shape) // math.prod(sizes)
    return item * padded + kernel_item * math.prod(kernel)


def _values(body: str) -> dict[str, tuple[int, list[int]]]:
    """Return (bytes of an element, shape) of every array by name."""
    return {name: (_ITEM.get(kind, 4), _shape(shape)) for name, kind, shape in _VALUE.findall(body)}


def _shape(written: str) -> list[int]:
    return [int(n) for n in written.split(",") if n]
