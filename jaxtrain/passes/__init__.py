"""Passes: functions that rewrite a program, or add to it; unaware of training.

Each folder imports only from those above it (`tests/test_architecture.py`):

marks           names by which passes find what others have put into a program
numerics        precision: what is computed, stored and rounded in which dtype
fp8             products in 8 bits
memory          what the backward pass stores, and what it computes again
mesh            parameters and gradients that are divided over devices
xla_gpu         forms of a program that XLA compiles better for GPUs
policies        the named precisions, each a composition of these
rounded_values  counts of the values that a program rounds
hooks           functions of a gradient, as `Tensor.register_hook`
pipeline        the order of the passes of a training step, as data
"""

from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.kernels import KernelCopies as KernelCopies
from jaxtrain.passes.fp8.kernels import KernelUse as KernelUse
from jaxtrain.passes.fp8.kernels import format_uses as format_uses
from jaxtrain.passes.fp8.kernels import kernel_uses as kernel_uses
from jaxtrain.passes.fp8.operands import gradient_format as gradient_format
from jaxtrain.passes.fp8.quantized_kernel import Whole as Whole
from jaxtrain.passes.fp8.scales import E4M3 as E4M3
from jaxtrain.passes.hooks import Hook as Hook
from jaxtrain.passes.hooks import add_hooks as add_hooks
from jaxtrain.passes.hooks import hook
from jaxtrain.passes.marks import DIVIDED_LOOKUP as DIVIDED_LOOKUP
from jaxtrain.passes.memory.blocks import at_blocks as at_blocks
from jaxtrain.passes.memory.blocks import count_blocks as count_blocks
from jaxtrain.passes.memory.remat import BLOCK as BLOCK
from jaxtrain.passes.memory.remat import block
from jaxtrain.passes.memory.remat import remat as remat
from jaxtrain.passes.memory.unroll import unroll as unroll
from jaxtrain.passes.mesh.gathered import used_dtypes as used_dtypes
from jaxtrain.passes.mesh.gathered import with_copies as with_copies
from jaxtrain.passes.mesh.gradient_groups import Groups as Groups
from jaxtrain.passes.mesh.gradient_groups import Partial as Partial
from jaxtrain.passes.mesh.lookup_gradients import lookup_gradients as lookup_gradients
from jaxtrain.passes.mesh.merged_rows import UnmergeRows as UnmergeRows
from jaxtrain.passes.mesh.partial_gradients import partial_gradients as partial_gradients
from jaxtrain.passes.mesh.window_sums import LastPartial as LastPartial
from jaxtrain.passes.numerics.autocast import KERNEL as KERNEL
from jaxtrain.passes.numerics.autocast import LOSS as LOSS
from jaxtrain.passes.numerics.autocast import autocast, autocast_disabled, kernel
from jaxtrain.passes.numerics.autocast import low_operation as low_operation
from jaxtrain.passes.numerics.autocast import low_precision as low_precision
from jaxtrain.passes.numerics.bias import biased_products as biased_products
from jaxtrain.passes.numerics.casts import in_float32 as in_float32
from jaxtrain.passes.numerics.casts import widen as widen
from jaxtrain.passes.numerics.exponents import BASE as BASE
from jaxtrain.passes.numerics.exponents import bounds as bounds
from jaxtrain.passes.numerics.exponents import rounding_limits as rounding_limits
from jaxtrain.passes.numerics.recompute import RECOMPUTED as RECOMPUTED
from jaxtrain.passes.numerics.recompute import recomputed as recomputed
from jaxtrain.passes.numerics.stored import convert_where_used as convert_where_used
from jaxtrain.passes.policies import Policy
from jaxtrain.passes.policies import policy as policy
from jaxtrain.passes.rounded_values import Counter as Counter
from jaxtrain.passes.rounded_values import Counters as Counters
from jaxtrain.passes.rounded_values import Formats as Formats
from jaxtrain.passes.rounded_values import count_rounded as count_rounded
from jaxtrain.passes.rounded_values import zero_counters as zero_counters
from jaxtrain.passes.xla_gpu.fp8_casts import fuse_casts as fuse_casts
from jaxtrain.passes.xla_gpu.logits import overwrite_logits as overwrite_logits
from jaxtrain.passes.xla_gpu.scanned import fuse_slices as fuse_slices
from jaxtrain.passes.xla_gpu.scanned import save_costly as save_costly
from jaxtrain.passes.xla_gpu.split_products import split_products as split_products
from jaxtrain.passes.xla_gpu.stacks import unfilled_stacks as unfilled_stacks

__all__ = [
    "Fp8",
    "Policy",
    "autocast",
    "autocast_disabled",
    "block",
    "fp8",
    "hook",
    "kernel",
    "memory",
    "mesh",
    "numerics",
    "pipeline",
    "xla_gpu",
]
