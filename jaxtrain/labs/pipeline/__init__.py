"""The mesh axis `pipeline`: the layers of a model, divided over devices that pass micro-batches to each other.

mesh_stages         what a mesh with the axis needs of a step, and its stages
pipelined_gradient  the gradient of a window in a pipeline, `StepParts.window`
pipelined_window    the same for a function of its variables: ticks, forward and backward
head                what follows the layers
pipeline_stages     the stages and their schedule
layered_function    a function, split at its scan over layers
residuals           a function and its pull-back as two functions
"""

from jaxtrain.labs.pipeline.mesh_stages import pipelined, require_pipelined
from jaxtrain.labs.pipeline.pipeline_stages import Schedule

__all__ = ["Schedule", "pipelined", "require_pipelined"]
