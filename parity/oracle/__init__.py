"""The float64 truth of code that hard-wires lower precisions.

A model with float64 weights and batches does not compute in float64 where its code calls `.float()` or
`astype(float32)`, as RMSNorm and rotary embeddings do. Here every such conversion yields float64: in PyTorch when
operations are dispatched, including those of the backward pass; in JAX in the jaxpr, before differentiation. complex64
becomes complex128. Integers, booleans, keys and the draws of dropout keep their bits.

A scalar literal (`0.1`) in float32 code has already been rounded: `written_number` recovers it. Arrays of constants
keep their rounding on both sides.
"""
