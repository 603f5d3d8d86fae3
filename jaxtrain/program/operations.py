"""The operations of programs, by the names that JAX's primitives have.

Passes write `op.of(eqn) == op.SCAN`, so that an operation that the next JAX renames is a change here alone;
`tests/program/test_primitives.py` compares the names with those of JAX's primitives.
"""

from jax.extend.core import JaxprEqn


def of(eqn: JaxprEqn) -> str:
    """Return the operation of an equation.

    >>> import jax
    >>> [of(eqn) for eqn in jax.make_jaxpr(jax.numpy.sin)(1.0).eqns]
    ['sin']
    """
    name: str = eqn.primitive.name
    return name


# Control flow, calls and derivatives.
JIT = "jit"
PJIT = "pjit"
CLOSED_CALL = "closed_call"
EVAL_JAXPR = "eval_jaxpr"
CALL = "call"
COMPOSITE = "composite"
CUSTOM_VMAP_CALL = "custom_vmap_call"
CHECKPOINT = "checkpoint"
REMAT2 = "remat2"
CUSTOM_JVP_CALL = "custom_jvp_call"
CUSTOM_VJP_CALL = "custom_vjp_call"
SCAN = "scan"
WHILE = "while"
COND = "cond"
SHARD_MAP = "shard_map"
XLA_METADATA_CALL = "xla_metadata_call"
CALL_HI_PRIMITIVE = "call_hi_primitive"

# Products.
DOT_GENERAL = "dot_general"
RAGGED_DOT_GENERAL = "ragged_dot_general"
SCALED_DOT = "scaled_dot"
CONV_GENERAL_DILATED = "conv_general_dilated"

# Elementwise.
ABS = "abs"
ADD = "add"
ADD_ANY = "add_any"
AND = "and"
CEIL = "ceil"
CLAMP = "clamp"
COS = "cos"
DIV = "div"
EQ = "eq"
ERF = "erf"
ERFC = "erfc"
EXP = "exp"
EXP2 = "exp2"
EXPM1 = "expm1"
FLOOR = "floor"
GE = "ge"
GT = "gt"
INTEGER_POW = "integer_pow"
IS_FINITE = "is_finite"
LE = "le"
LOG = "log"
LOG1P = "log1p"
LOG2 = "log2"
LOGISTIC = "logistic"
LT = "lt"
MAX = "max"
MIN = "min"
MUL = "mul"
NE = "ne"
NEG = "neg"
NOT = "not"
ONE_MINUS_SQUARE = "one_minus_square"
OR = "or"
POLYNOMIAL = "polynomial"
POW = "pow"
ROUND = "round"
RSQRT = "rsqrt"
SELECT_N = "select_n"
SIGN = "sign"
SIN = "sin"
SQRT = "sqrt"
SQUARE = "square"
SUB = "sub"
TANH = "tanh"
XOR = "xor"
SHIFT_LEFT = "shift_left"
SHIFT_RIGHT_LOGICAL = "shift_right_logical"

# Dtypes.
CONVERT_ELEMENT_TYPE = "convert_element_type"
BITCAST_CONVERT_TYPE = "bitcast_convert_type"
REDUCE_PRECISION = "reduce_precision"

# Layout.
BROADCAST_IN_DIM = "broadcast_in_dim"
CONCATENATE = "concatenate"
COPY = "copy"
DIM_AS_VALUE = "dim_as_value"
DYNAMIC_SLICE = "dynamic_slice"
GATHER = "gather"
IOTA = "iota"
NAME = "name"
OPTIMIZATION_BARRIER = "optimization_barrier"
PAD = "pad"
RESHAPE = "reshape"
REV = "rev"
SHARDING_CONSTRAINT = "sharding_constraint"
SLICE = "slice"
SPLIT = "split"
SQUEEZE = "squeeze"
STACK = "stack"
STOP_GRADIENT = "stop_gradient"
TRANSPOSE = "transpose"

# Reductions and sorts.
REDUCE_AND = "reduce_and"
REDUCE_MAX = "reduce_max"
REDUCE_MIN = "reduce_min"
REDUCE_OR = "reduce_or"
REDUCE_SUM = "reduce_sum"
SORT = "sort"

# Random numbers.
RANDOM_BITS = "random_bits"
RANDOM_FOLD_IN = "random_fold_in"
RANDOM_SPLIT = "random_split"
RANDOM_UNWRAP = "random_unwrap"
RANDOM_WRAP = "random_wrap"
RNG_BIT_GENERATOR = "rng_bit_generator"
THREEFRY2X32 = "threefry2x32"

# Collectives.
ALL_GATHER = "all_gather"
ALL_GATHER_INVARIANT = "all_gather_invariant"
ALL_TO_ALL = "all_to_all"
PPERMUTE = "ppermute"
PSUM = "psum"
PSUM_INVARIANT = "psum_invariant"
REDUCE_SCATTER = "reduce_scatter"

# Code that JAX does not see into.
CALL_EXPORTED = "call_exported"
FFI_CALL = "ffi_call"
IO_CALLBACK = "io_callback"
PALLAS_CALL = "pallas_call"
PURE_CALLBACK = "pure_callback"

CALLS = (JIT, PJIT)
"""Calls of jitted functions."""

CHECKPOINTS = (CHECKPOINT, REMAT2)
"""Calls whose jaxpr the backward pass computes again."""

FUNCTIONS = frozenset({*CALLS, *CHECKPOINTS})
"""Calls and checkpoints."""

EVALUATIONS = (EVAL_JAXPR, CLOSED_CALL, CALL, COMPOSITE, CUSTOM_VMAP_CALL)
"""Operations that apply a jaxpr to their operands, without a boundary of its own: what differentiation splits off a
checkpoint ("closed_call", since JAX 0.12 "eval_jaxpr"), and functions with a rule for other compilers or for `vmap`."""

CUSTOM = (CUSTOM_JVP_CALL, CUSTOM_VJP_CALL)
"""Calls of functions with a derivative of their own, which is traced when they are differentiated."""

APPLICATIONS = frozenset({*FUNCTIONS, *EVALUATIONS, *CUSTOM})
"""Operations whose results are those of one jaxpr, applied to the same operands."""

IDENTITIES = frozenset({COPY, NAME, SHARDING_CONSTRAINT})
"""Operations that return their operand."""

LAYOUT = IDENTITIES | {DYNAMIC_SLICE, RESHAPE, SLICE, SQUEEZE, TRANSPOSE}
"""Operations that return the numbers of their first operand, or a part of them; their other operands are indices."""

PRODUCTS = frozenset({DOT_GENERAL, RAGGED_DOT_GENERAL, CONV_GENERAL_DILATED})
"""Operations that multiply matrices: PyTorch's autocast computes them in low precision."""

ELEMENTWISE = frozenset(
    {
        *(ABS, ADD, ADD_ANY, AND, CEIL, CLAMP, COS, DIV, EQ, ERF, ERFC, EXP, EXP2, EXPM1, FLOOR, GE, GT, INTEGER_POW),
        *(IS_FINITE, LE, LOG, LOG1P, LOG2, LOGISTIC, LT, MAX, MIN, MUL, NE, NEG, NOT, ONE_MINUS_SQUARE, OR, POLYNOMIAL),
        *(POW, ROUND, RSQRT, SELECT_N, SIGN, SIN, SQRT, SQUARE, SUB, TANH, XOR),
    }
)
"""Operations that compute each element of their result from those at the same place."""
