"""Attention at any length: one function, computed by its formula, by kernels, or block by block.

The modules, each of which imports only from those above it:

    options         what is computed: static options, and arrays that may be absent
    dropout_mask    blocks of a dropout mask
    formula         all scores at once
    blocks          the pairs of blocks that have anything to compute
    block_arrays    the arrays in blocks, the scores of a pair of blocks
    blockwise       block by block, with logarithms of sums by which parts are combined
    cudnn           the kernel of CUDA
    pallas_tiles    what a kernel computes of a tile of scores
    pallas_gpu      kernels for GPUs where CUDA has none, and for long packed rows
    partitioned     a kernel in a program for a mesh
    primitives      the choice between them, when a program is compiled
    function        `attention`
"""

from jaxtrain.models.attention.formula import segment_mask
from jaxtrain.models.attention.function import attention
from jaxtrain.models.attention.primitives import FORWARD as FORWARD
from jaxtrain.models.attention.primitives import as_formula as as_formula
from jaxtrain.models.attention.primitives import drawn_mask as drawn_mask
from jaxtrain.models.attention.primitives import draws_mask as draws_mask
from jaxtrain.models.attention.primitives import is_long as is_long

__all__ = ["attention", "segment_mask"]
