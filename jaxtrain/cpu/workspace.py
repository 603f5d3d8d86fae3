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

from jaxtrain.program.hlo import Computation, Instruction, element_bytes, parse_hlo

_CONVOLUTION = re.compile(r"window=\{(.*?)\}, dim_labels=(\w+)_")


def cpu_workspace(hlo: str) -> int:
    """Estimate the largest block that XLA's CPU library allocates.

    Args:
      hlo: Text of a compiled program.

    Returns:
      Bytes; 0 for a program that is not for the CPU.
    """
    computations, _ = parse_hlo(hlo)
    instructions = (x for computation in computations.values() for x in computation.instructions.values())
    bodies = (computations[name] for x in instructions if "__ynn_fusion" in x.attributes for name in x.fused)
    return max(
        (_convolution(x, y) for y in bodies for x in y.instructions.values() if x.opcode == "convolution"), default=0
    )


def _convolution(x: Instruction, body: Computation) -> int:
    found = _CONVOLUTION.search(x.attributes)
    if found is None:
        raise ValueError(f"a convolution without window and dim_labels: {x.attributes[:200]}")
    image, kernel = (body.instructions[name].results[0] for name in x.operand_names)
    window = dict(part.split("=") for part in found[1].split())
    axes = sorted(axis for axis in found[2] if axis.isdecimal())
    sizes = [image.shape[found[2].index(axis)] for axis in axes]
    dilated = [
        (n - 1) * int(d) + 1
        for n, d in zip(sizes, window.get("lhs_dilate", "x".join("1" * len(sizes))).split("x"), strict=True)
    ]
    pads = [sum(map(int, pad.split("_"))) for pad in window.get("pad", "x".join(["0_0"] * len(sizes))).split("x")]
    padded = math.prod(n + pad for n, pad in zip(dilated, pads, strict=True)) * image.size // math.prod(sizes)
    return int(element_bytes(image.dtype) * padded + kernel.size_bytes)
