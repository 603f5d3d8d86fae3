"""Other ways to compute the gradient of a window than that of `jaxtrain.step.step`.

Each is a function `(parts, state, micro_batches, k) -> Gradient`, `StepParts.window`; `streaming` has the window in the
state, and takes its micro-batches one by one.

mesh_window  on a mesh: sums of each group of rows, added once
streaming    micro-batches that arrive one by one
"""
