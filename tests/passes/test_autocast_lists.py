"""The dtype that each operation returns under `autocast` and under `torch.autocast`.

The CUDA lists are queried without a GPU: fake tensors dispatch like CUDA tensors and compute nothing.
"""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from torch._subclasses.fake_tensor import FakeTensorMode

from jaxtrain.passes.numerics.autocast import autocast, kernel
from jaxtrain.passes.numerics.autocast_lists import LISTS

# Every function takes a low-precision [4, 4], a float32 [4, 4] and a float32 [4].
PRODUCTS = {
    "matmul": (lambda low, x, b: x @ x, lambda low, x, b: x @ x),
    "matmul of both": (lambda low, x, b: low @ x, lambda low, x, b: low @ x),
    "mv": (lambda low, x, b: torch.mv(x, b), lambda low, x, b: x @ b),
    "bmm": (lambda low, x, b: torch.bmm(*2 * [x.reshape(1, 4, 4)]), lambda low, x, b: jnp.matmul(x[None], x[None])),
    "einsum": (lambda low, x, b: torch.einsum("ij,kj->ik", x, x), lambda low, x, b: jnp.einsum("ij,kj->ik", x, x)),
    "linear": (lambda low, x, b: F.linear(x, x, b), lambda low, x, b: x @ x.T + b[None]),
    "linear of low": (lambda low, x, b: F.linear(low, x, b), lambda low, x, b: b[None] + low @ x.T),
    "addmm": (lambda low, x, b: torch.addmm(b, x, x), lambda low, x, b: x @ x + b.reshape(1, 4)),
    "multi_dot": (lambda low, x, b: torch.linalg.multi_dot([x, x]), lambda low, x, b: jnp.linalg.multi_dot([x, x])),
    "vecdot": (lambda low, x, b: torch.linalg.vecdot(x, x), lambda low, x, b: jnp.linalg.vecdot(x, x)),
    "conv1d": (lambda low, x, b: F.conv1d(x.reshape(1, 4, 4), x.reshape(4, 4, 1)), lambda low, x, b: convolve(x)),
    "conv1d with bias": (
        lambda low, x, b: F.conv1d(x.reshape(1, 4, 4), x.reshape(4, 4, 1), b),
        lambda low, x, b: convolve(x) + b[None, :, None],
    ),
    "attention": (
        lambda low, x, b: F.scaled_dot_product_attention(*3 * [x.reshape(1, 1, 4, 4)]),
        lambda low, x, b: jax.nn.dot_product_attention(*3 * [x[None, :, None]]),
    ),
}
UNARY = {
    "acos": (torch.acos, jnp.arccos),
    "asin": (torch.asin, jnp.arcsin),
    "atan": (torch.atan, jnp.arctan),
    "cosh": (torch.cosh, jnp.cosh),
    "sinh": (torch.sinh, jnp.sinh),
    "tan": (torch.tan, jnp.tan),
    "sin": (torch.sin, jnp.sin),
    "cos": (torch.cos, jnp.cos),
    "tanh": (torch.tanh, jnp.tanh),
    "asinh": (torch.asinh, jnp.arcsinh),
    "exp": (torch.exp, jnp.exp),
    "exp2 by pow": (lambda x: torch.pow(2.0, x), lambda x: jnp.exp2(x)),
    "expm1": (torch.expm1, jnp.expm1),
    "log": (torch.log, jnp.log),
    "log2": (torch.log2, jnp.log2),
    "log10": (torch.log10, jnp.log10),
    "log1p": (torch.log1p, jnp.log1p),
    "erf": (torch.erf, jax.scipy.special.erf),
    "erfinv": (torch.erfinv, jax.scipy.special.erfinv),
    "reciprocal": (torch.reciprocal, jnp.reciprocal),
    "rsqrt": (torch.rsqrt, lax.rsqrt),
    "sqrt": (torch.sqrt, jnp.sqrt),
    "pow 2": (lambda x: x**2, lambda x: x**2),
    "pow 2.5": (lambda x: x**2.5, lambda x: x**2.5),
    "square": (torch.square, jnp.square),
    "abs": (torch.abs, jnp.abs),
    "neg": (torch.neg, jnp.negative),
    "sign": (torch.sign, jnp.sign),
    "round": (torch.round, jnp.round),
    "clamp": (lambda x: x.clamp(-1, 1), lambda x: jnp.clip(x, -1, 1)),
    "sigmoid": (torch.sigmoid, jax.nn.sigmoid),
    "relu": (F.relu, jax.nn.relu),
    "relu6": (F.relu6, jax.nn.relu6),
    "leaky_relu": (F.leaky_relu, jax.nn.leaky_relu),
    "elu": (F.elu, jax.nn.elu),
    "silu": (F.silu, jax.nn.silu),
    "gelu": (F.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu as a kernel": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: kernel(lambda x: jax.nn.gelu(x, approximate=True))(x),
    ),
    "hardtanh": (F.hardtanh, jax.nn.hard_tanh),
    "softplus": (F.softplus, jax.nn.softplus),
    "softmax": (lambda x: F.softmax(x, -1), lambda x: jax.nn.softmax(x, -1)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), lambda x: jax.nn.log_softmax(x, -1)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, -1)),
    "sum": (torch.sum, jnp.sum),
    "sum over an axis": (lambda x: x.sum(-1), lambda x: x.sum(-1)),
    "prod": (torch.prod, jnp.prod),
    "mean": (torch.mean, jnp.mean),
    "var": (torch.var, jnp.var),
    "std": (torch.std, jnp.std),
    "amax": (lambda x: x.amax(-1), lambda x: x.max(-1)),
    "cumsum": (lambda x: x.cumsum(-1), lambda x: jnp.cumsum(x, -1)),
    "cumprod": (lambda x: x.cumprod(-1), lambda x: jnp.cumprod(x, -1)),
    "norm": (torch.linalg.vector_norm, lambda x: jnp.linalg.norm(x.ravel())),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), lambda x: jax.nn.standardize(x, epsilon=1e-5)),
    "sort": (lambda x: x.sort().values, jnp.sort),
    "flip": (lambda x: x.flip(0), jnp.flip),
    "transpose": (lambda x: x.mT, lambda x: x.T),
    "index": (lambda x: x.narrow(0, 1, 3), lambda x: x[1:]),
    "gather": (
        lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
        lambda x: jnp.take_along_axis(x, jnp.zeros((4, 4), int), 1),
    ),
    "tril": (torch.tril, jnp.tril),
    "times a number": (lambda x: x * 2.0 + 1, lambda x: x * 2.0 + 1),
    "trace": (torch.trace, jnp.trace),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=x.device)),
        lambda x: -jax.nn.log_softmax(x)[:, 0].mean(),
    ),
}
BINARY = {
    "add": (torch.add, jnp.add),
    "sub": (torch.sub, jnp.subtract),
    "mul": (torch.mul, jnp.multiply),
    "div": (torch.div, jnp.divide),
    "maximum": (torch.maximum, jnp.maximum),
    "pow": (torch.pow, jnp.power),
    "atan2": (torch.atan2, jnp.arctan2),
    "where": (lambda a, b: torch.where(a > 0, a, b), lambda a, b: jnp.where(a > 0, a, b)),
    "cat": (lambda a, b: torch.cat([a, b]), lambda a, b: jnp.concatenate([a, b])),
    "stack": (lambda a, b: torch.stack([a, b]), lambda a, b: jnp.stack([a, b])),
    "mse_loss": (F.mse_loss, lambda a, b: jnp.square(a - b).mean()),
    "l1_loss": (F.l1_loss, lambda a, b: jnp.abs(a - b).mean()),
    "smooth_l1_loss": (
        F.smooth_l1_loss,
        lambda a, b: jnp.where(jnp.abs(a - b) < 1, 0.5 * (a - b) ** 2, jnp.abs(a - b) - 0.5).mean(),
    ),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        lambda a, b: (jnp.maximum(a, 0.0) - a * b + jnp.log1p(jnp.exp(-jnp.abs(a)))).mean(),
    ),
}

OPERATIONS = (
    PRODUCTS
    | {name: (lambda low, x, b, f=f: f(low), lambda low, x, b, g=g: g(low)) for name, (f, g) in UNARY.items()}
    | {
        f"{name} of {kinds}": (
            lambda low, x, b, f=f, of=of: f(*of(low, x)),
            lambda low, x, b, g=g, of=of: g(*of(low, x)),
        )
        for name, (f, g) in BINARY.items()
        for kinds, of in {"low and low": lambda low, x: (low, low), "low and float32": lambda low, x: (low, x)}.items()
    }
)

# Operations that return another dtype in JAX, and why.
KERNEL = "one kernel in PyTorch, in JAX several operations, some of them listed"
NORMS = "JAX's models compute their norms with it, and norms are in float32"
PRODUCT = "the same primitive, dot_general, as the listed products"
LOSS = "several operations in JAX; the step converts losses to float32 when it sums them"
DIFFER = {
    "cuda": {"elu": KERNEL, "mean": NORMS, "var": NORMS, "std": NORMS, "trace": KERNEL},
    "cpu": {
        "mv": PRODUCT,
        "trace": KERNEL,
        "mse_loss of low and low": LOSS,
        "l1_loss of low and low": LOSS,
        "smooth_l1_loss of low and low": LOSS,
        "binary_cross_entropy_with_logits of low and low": LOSS,
        "cross_entropy": LOSS,
    },
}


def convolve(x):
    return lax.conv_general_dilated(x[None], x[:, :, None], (1,), "VALID")


@contextmanager
def torch_autocast(device, dtype):
    """Enter `torch.autocast`, which disables itself for CUDA on machines without it."""
    enabled, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, before)
        torch.clear_autocast_cache()


def torch_dtype(fn, device, dtype):
    with FakeTensorMode(), torch_autocast(device, dtype):
        x, b = torch.empty(4, 4, device=device), torch.empty(4, device=device)
        return str(fn(x @ x, x, b).dtype).removeprefix("torch.")


def jax_dtype(fn, device, dtype):
    x, b = jax.ShapeDtypeStruct((4, 4), np.float32), jax.ShapeDtypeStruct((4,), np.float32)
    return jax.eval_shape(autocast(lambda x, b: fn(x @ x, x, b), dtype, device), x, b).dtype.name


@pytest.mark.parametrize("device", LISTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_returns_the_same_dtype_as_in_pytorch(operation, device):
    in_torch, in_jax = OPERATIONS[operation]
    for low in ("float16", "bfloat16"):
        expected, found = torch_dtype(in_torch, device, getattr(torch, low)), jax_dtype(in_jax, device, low)
        assert {expected, found} <= {"float32", low}
        assert (found != expected) == (operation in DIFFER[device])
