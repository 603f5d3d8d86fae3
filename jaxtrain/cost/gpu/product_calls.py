"""The products of a program for a GPU: their dtypes, FLOPs and the calls that compute them."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxtrain.cost.gpu.launches import PRODUCTS, Program, launch_kind
from jaxtrain.program.hlo import Array, Computation, Instruction, parse_numbers

_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d",]*)[\]}]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"feature_group_count=(\d+)")
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([\d", ]+)\]')
_PRECISION = re.compile(r'operand_precision(?:"?:\[|=\{)("?\w+)')
# Products of cuDNN's attention: 2 forwards, 5 backwards, which computes the scores again (Dao et al. 2022).
_ATTENTION_PRODUCTS = {False: 2, True: 5}
# Those of our own kernels, of which the gradients of queries and of keys compute scores and their gradients both.
_KERNEL_PRODUCTS = {"attend": 2, "differentiate_queries": 3, "differentiate_keys": 4, "differentiate_bias": 2}
_FUSED = re.compile(r"/fused_attention(?:_backward)?(_causal)?/")
# In the scopes, or on a mesh, where these end with the partitioned function, in the call's own configuration.
_KERNEL = re.compile(rf"[/\"]({'|'.join(_KERNEL_PRODUCTS)})\b")


@dataclass(frozen=True)
class Product:
    """A product, convolution or attention.

    Attributes:
      instruction: The instruction.
      by: What computes it: "cuBLAS product", "cuDNN attention", "Pallas attention", "cuDNN convolution", or
        "fusion" for one in a kernel.
      operands: Dtypes of the two operands in HLO's names.
      result: Dtype of the result.
      flops: FLOPs of one launch.
      times: How often it runs in one run of the program.
      full_precision: Whether float32 operands are multiplied in full precision rather than in tf32.
    """

    instruction: Instruction
    by: str
    operands: tuple[str, str]
    result: str
    flops: float
    times: int
    full_precision: bool

    @property
    def dtypes(self) -> str:
        """The dtypes as text, such as "bf16×bf16→f32"."""
        return f"{'×'.join(self.operands)}→{self.result}"


def products(program: Program) -> Iterator[Product]:
    """Yield the products of a program, those in fusions too."""
    for name, computation in program.computations.items():
        for x in computation.instructions.values():
            kind = launch_kind(x)
            if x.opcode in ("dot", "convolution"):
                yield _product(program, computation, name, x, "fusion")
            elif kind in PRODUCTS:
                yield _product(program, computation, name, x, kind)


def _product(program: Program, computation: Computation, name: str, x: Instruction, by: str) -> Product:
    operands = [computation.instructions[o].results[0] for o in x.operand_names if o in computation.instructions]
    if by == "Pallas attention":
        queries, flops = _attention_kernel(x, operands)
        return Product(x, by, (queries.dtype,) * 2, queries.dtype, flops, program.runs[name], queries.dtype == "f32")
    left, right, result = *operands[:2], x.results[0]
    if by == "cuDNN attention":
        flops = _attention_flops(x, left)
    elif _LABELS.search(x.attributes):
        flops = _convolution_flops(x, left, right, result)
    else:
        flops = _dot_flops(x, left, result)
    precision = _PRECISION.search(x.attributes)
    full = precision is not None and precision[1].strip('"').lower() == "highest"
    return Product(x, by, (left.dtype, right.dtype), result.dtype, flops, program.runs[name], full)


def _dot_flops(x: Instruction, left: Array, result: Array) -> float:
    found = _CONTRACTED.search(x.attributes)
    axes = parse_numbers(found[1].replace('"', "")) if found else []
    return 2.0 * result.size * math.prod(left.shape[axis] for axis in axes)


def _convolution_flops(x: Instruction, left: Array, right: Array, result: Array) -> float:
    """Two FLOPs per element of the output and of the kernel of one of its features; gradients have as many."""
    found = _LABELS.search(x.attributes)
    assert found is not None
    output, kernel, labels = result, right, found[2]
    if "BackwardInput" in x.target:
        output = left
    elif "BackwardFilter" in x.target:
        output, kernel = right, result
    return 2.0 * output.size * kernel.size / kernel.shape[labels.index("o")]


def _attention_kernel(x: Instruction, operands: list[Array]) -> tuple[Array, float]:
    """Return an array [B, T, N, H] of one of our kernels of attention, and its FLOPs."""
    scope, kernel = _FUSED.search(x.op_name), _KERNEL.search(f"{x.op_name} {x.attributes}")
    assert scope is not None
    assert kernel is not None, f"a kernel of attention with unknown products: {x.op_name}"
    arrays = [array for array in (*operands, *x.results) if array.dtype in ("bf16", "f16", "f32")]
    _, heads, t = next(array.shape for array in arrays if len(array.shape) == 3)  # the logarithms of sums
    of_heads = [array for array in arrays if len(array.shape) == 4 and array.shape[2] != t]
    queries = next(array for array in of_heads if array.shape[1:3] == (t, heads))
    s = next((array.shape[1] for array in of_heads if array.shape[1:3] != (t, heads)), t)
    share = 0.5 if scope[1] else 1.0
    return queries, 2.0 * share * queries.size * s * _KERNEL_PRODUCTS[kernel[1]]


def _attention_flops(x: Instruction, query: Array) -> float:
    found = _SCORES.search(x.attributes)
    assert found is not None, f"attention without the shape of its scores: {x.name}"
    scores = math.prod(parse_numbers(found[1].replace('"', "").replace(" ", "")))
    causal = 0.5 if "CAUSAL" in x.attributes else 1.0
    return 2.0 * causal * scores * query.shape[-1] * _ATTENTION_PRODUCTS["Backward" in x.target]
