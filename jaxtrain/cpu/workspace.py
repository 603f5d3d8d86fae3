"""What XLA's CPU library allocates for itself while a step runs, of which the compiler's plan says nothing.

Convolutions and sums over rows are calls of a library (YNNPACK) there. It takes blocks of its own: a convolution a copy
of its input, padded, and one of its kernel, which in the gradient of the weights is as large as the activations; a sum
over rows, of so many columns that its block of 2^15 results holds few of them, partial sums. These sizes were measured,
as `tests/planning/test_plan.py` measures them again: the library documents none.
"""

import math
import re

_BLOCK = 2**15
_ITEM = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
_COMPUTATION = re.compile(r"^%?([\w.-]+) \(.*\{$", re.M)
_CALL = re.compile(r"kind=kCustom, calls=%?([\w.-]+),.*__ynn_fusion")
_VALUE = re.compile(r"%?([\w.-]+) = (\w+)\[([\d,]*)\]")
_CONVOLUTION = re.compile(r"\bconvolution\(%?([\w.-]+), %?([\w.-]+)\), window=\{(.*?)\}, dim_labels=(\w+)_")
_REDUCE = re.compile(r"= \w+\[([\d,]*)\]\S* reduce\(%?([\w.-]+),.*dimensions=\{([\d,]*)\}")


def cpu_workspace(hlo: str) -> int:
    """Bytes of the largest such block in a program compiled for the CPU, given as text; 0 of any other program."""
    called = set(_CALL.findall(hlo))
    if not called:
        return 0
    parts = _COMPUTATION.split(hlo)[1:]
    bodies = (body for name, body in zip(parts[::2], parts[1::2], strict=True) if name in called)
    return max(max(_convolution(body.partition("\n}")[0]), _reduction(body.partition("\n}")[0])) for body in bodies)


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


def _reduction(body: str) -> int:
    found = _REDUCE.search(body)
    if found is None:
        return 0
    item, shape = _values(body)[found[2]]
    if str(len(shape) - 1) in found[3].split(","):
        return 0
    columns = math.prod(_shape(found[1]))
    return item * math.prod(shape) // max(1, _BLOCK // columns)


def _values(body: str) -> dict[str, tuple[int, list[int]]]:
    """Bytes of an element, and shape, of every array that has a line."""
    return {name: (_ITEM.get(kind, 4), _shape(shape)) for name, kind, shape in _VALUE.findall(body)}


def _shape(written: str) -> list[int]:
    return [int(n) for n in written.split(",") if n]
