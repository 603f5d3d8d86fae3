"""Transforms of functions through their jaxprs: precision, rematerialization, unrolling, hooks; unaware of training."""

from jaxtrain.transforms import delayed_scales as delayed_scales
from jaxtrain.transforms import fp8_kernels as fp8_kernels
from jaxtrain.transforms import fp8_operands as fp8_operands
from jaxtrain.transforms import fp8_product as fp8_product
from jaxtrain.transforms import fp8_scales as fp8_scales
from jaxtrain.transforms import kernel_product as kernel_product
from jaxtrain.transforms import quantized_kernel as quantized_kernel
from jaxtrain.transforms import scaled_product as scaled_product
from jaxtrain.transforms.bias import biased_products as biased_products
from jaxtrain.transforms.block_scales import BlockValues as BlockValues
from jaxtrain.transforms.block_scales import require_blocks as require_blocks
from jaxtrain.transforms.block_scales import scale_blocks as scale_blocks
from jaxtrain.transforms.blocks import at_blocks as at_blocks
from jaxtrain.transforms.blocks import count_blocks as count_blocks
from jaxtrain.transforms.casts import in_float32 as in_float32
from jaxtrain.transforms.casts import widen as widen
from jaxtrain.transforms.exponents import BASE as BASE
from jaxtrain.transforms.exponents import bounds as bounds
from jaxtrain.transforms.exponents import rounding_limits as rounding_limits
from jaxtrain.transforms.fp8 import Fp8
from jaxtrain.transforms.fp8_casts import fuse_casts as fuse_casts
from jaxtrain.transforms.fp8_kernels import KernelCopies as KernelCopies
from jaxtrain.transforms.fp8_kernels import KernelUse as KernelUse
from jaxtrain.transforms.fp8_kernels import format_uses as format_uses
from jaxtrain.transforms.fp8_kernels import kernel_uses as kernel_uses
from jaxtrain.transforms.fp8_operands import gradient_format as gradient_format
from jaxtrain.transforms.fp8_scales import E4M3 as E4M3
from jaxtrain.transforms.gathered import DIVIDED_LOOKUP as DIVIDED_LOOKUP
from jaxtrain.transforms.gathered import used_dtypes as used_dtypes
from jaxtrain.transforms.gathered import with_copies as with_copies
from jaxtrain.transforms.groups import Groups as Groups
from jaxtrain.transforms.groups import LastPartial as LastPartial
from jaxtrain.transforms.groups import Partial as Partial
from jaxtrain.transforms.hooks import Hook as Hook
from jaxtrain.transforms.hooks import add_hooks as add_hooks
from jaxtrain.transforms.hooks import hook
from jaxtrain.transforms.layers import LayeredFunction as LayeredFunction
from jaxtrain.transforms.logits import overwrite_logits as overwrite_logits
from jaxtrain.transforms.lookup_gradients import lookup_gradients as lookup_gradients
from jaxtrain.transforms.loops import at_most as at_most
from jaxtrain.transforms.loops import most_times as most_times
from jaxtrain.transforms.merged_rows import UnmergeRows as UnmergeRows
from jaxtrain.transforms.partial_gradients import partial_gradients as partial_gradients
from jaxtrain.transforms.platform import is_gpu as is_gpu
from jaxtrain.transforms.policies import Policy
from jaxtrain.transforms.policies import policy as policy
from jaxtrain.transforms.precision import KERNEL as KERNEL
from jaxtrain.transforms.precision import LOSS as LOSS
from jaxtrain.transforms.precision import autocast, autocast_disabled, kernel
from jaxtrain.transforms.precision import low_operation as low_operation
from jaxtrain.transforms.precision import low_precision as low_precision
from jaxtrain.transforms.quantized_kernel import Whole as Whole
from jaxtrain.transforms.recompute import RECOMPUTED as RECOMPUTED
from jaxtrain.transforms.recompute import recomputed as recomputed
from jaxtrain.transforms.remat import BLOCK as BLOCK
from jaxtrain.transforms.remat import block
from jaxtrain.transforms.remat import remat as remat
from jaxtrain.transforms.residuals import StoredResiduals as StoredResiduals
from jaxtrain.transforms.rounded_values import Counter as Counter
from jaxtrain.transforms.rounded_values import Counters as Counters
from jaxtrain.transforms.rounded_values import Formats as Formats
from jaxtrain.transforms.rounded_values import count_rounded as count_rounded
from jaxtrain.transforms.rounded_values import zero_counters as zero_counters
from jaxtrain.transforms.scanned import fuse_slices as fuse_slices
from jaxtrain.transforms.scanned import save_costly as save_costly
from jaxtrain.transforms.split_products import split_products as split_products
from jaxtrain.transforms.stacks import unfilled_stacks as unfilled_stacks
from jaxtrain.transforms.stages import Schedule as Schedule
from jaxtrain.transforms.stages import Stages as Stages
from jaxtrain.transforms.stored import convert_where_used as convert_where_used
from jaxtrain.transforms.unroll import unroll as unroll

__all__ = [
    "Fp8",
    "Policy",
    "autocast",
    "autocast_disabled",
    "block",
    "hook",
    "jax_internals",
    "jaxpr",
    "kernel",
    "precision",
]
