"""The float64 truth of code that hard-wires lower precisions.

Taking a model's weights and batch to float64 does not make it compute in float64 where it says `.float()` or
`astype(float32)` itself, as RMSNorms and rotary embeddings do. Here every such request yields float64: in PyTorch as
the operations are dispatched, those of the backward pass too; in JAX in the jaxpr, before it is differentiated.
complex64 becomes complex128. What is no number keeps its bits: integers, booleans, keys, and the draws of dropout.

A scalar that the code wrote (`0.1`) has been rounded by the time it is seen, if float32 asked for it: `meant` finds
what was written. Arrays of constants keep the rounding they were made with, on both sides.
"""
