"""Loss scales by layer.

per_layer_scale  `per_layer_loss_scale`, and how its scales change
block_scales     the pass that scales the gradients inside each marked block
"""

from jaxtrain.labs.loss_scales.block_scales import BlockValues, require_blocks, scale_blocks
from jaxtrain.labs.loss_scales.per_layer_scale import per_layer_loss_scale

__all__ = ["BlockValues", "per_layer_loss_scale", "require_blocks", "scale_blocks"]
