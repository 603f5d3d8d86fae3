"""Part 3: attention on the device, output and gradients beside float64, then its time beside PyTorch's kernels."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.lines import emit, note
from benchmarks.gpu_check.pairs import ROUNDS
from benchmarks.timing import TURN, TURN_S
from jaxtrain.models.attention import attention

KERNELS = {"cuDNN": "__cudnn$fmha", "Pallas": "__gpu$xla.gpu.triton"}
"""Kernel -> what names it in a program."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention and what it leaves out.

    Attributes:
      rows, length, heads, keys, width: Sizes.
      segments: Sequences in each row; 1 for rows that are not packed.
      padding: Share of the keys that are padding.
      window: As that of `attention`.
      softcap: As that of `attention`.
      dropout: As that of `attention`; there is no exact result to compare with.
    """

    rows: int
    length: int
    heads: int
    keys: int
    width: int = 64
    segments: int = 1
    padding: float = 0.0
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def __str__(self) -> str:
        """Format the sizes and what is set."""
        parts = [f"{self.rows} × {self.length}, {self.heads} heads of {self.width}, {self.keys} key heads"]
        parts += [f"{self.segments} segments"] if self.segments > 1 else []
        parts += [f"{name} {x}" for name in ("padding", "window", "softcap", "dropout") if (x := getattr(self, name))]
        return ", ".join(parts)


RIGHT = (
    Shape(1, 1024, 2, 2),
    Shape(2, 256, 4, 2, window=100),
    Shape(2, 1024, 2, 1, segments=5),
    Shape(2, 1024, 2, 2, padding=0.3),
    Shape(1, 1500, 2, 1, segments=3, window=200, softcap=5.0),
    Shape(1, 1024, 2, 2, width=128, segments=4),
)
TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-18}
"""Largest root mean square error relative to that of the exact values: a few roundings to the dtype."""
TIMED = (
    Shape(16, 1024, 12, 12),
    Shape(4, 8192, 16, 8),
    Shape(4, 8192, 16, 8, segments=8),
    Shape(16, 2048, 16, 16, padding=0.25),
    Shape(4, 8192, 16, 8, window=1024, softcap=30.0),
    Shape(4, 8192, 16, 8, segments=8, dropout=0.1),
)
REHEARSED = (Shape(1, 256, 2, 1, segments=2), Shape(1, 128, 2, 2))


def operands(shape: Shape, dtype: Any) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Return the queries, keys, values and the gradient of the output, and the other arguments of `attention`."""
    rng = np.random.default_rng(0)
    sizes = [(shape.rows, shape.length, heads, shape.width) for heads in (shape.heads, shape.keys, shape.keys)]
    arrays = tuple(jnp.asarray(rng.normal(size=size), dtype) for size in (*sizes, sizes[0]))
    segments = np.sort(rng.integers(0, shape.segments, (shape.rows, shape.length)), axis=1).astype(np.int32)
    kept = np.broadcast_to(np.arange(shape.length) < shape.length * (1 - shape.padding), segments.shape)
    others: dict[str, Any] = {"causal": True, "window": shape.window, "softcap": shape.softcap}
    if shape.segments > 1:
        others["segments"] = (jnp.asarray(segments),) * 2
    if shape.padding:
        others["mask"] = jnp.asarray(kept)[:, None, None, :]
    if shape.dropout:
        others |= {"dropout": shape.dropout, "rng": jax.random.key(0)}
    return arrays, others


def with_gradients(attend: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function from (q, k, v, gradient of the output) to the output and the three gradients."""

    def compute(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(cotangent)

    return compute


def exact(shape: Shape, arrays: tuple[jax.Array, ...], others: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the output and the gradients in float64, with all scores at once."""
    n = shape.length
    age = np.arange(n)[:, None] - np.arange(n)
    seen = np.broadcast_to((age >= 0) & (age < (shape.window or n)), (shape.rows, 1, n, n))
    if "segments" in others:
        q_segments, k_segments = map(np.asarray, others["segments"])
        seen = seen & (q_segments[:, None, :, None] == k_segments[:, None, None, :])
    if "mask" in others:
        seen = seen & np.asarray(others["mask"])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, shape.heads // shape.keys, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(shape.width)
        if shape.softcap:
            scores = shape.softcap * jnp.tanh(scores / shape.softcap)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, scores, -np.inf)), v)

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wide = [jnp.asarray(np.asarray(x.astype(jnp.float32), np.float64)) for x in arrays]
        return [np.asarray(x) for x in jax.jit(with_gradients(attend))(*wide)]


def kernel_of(compiled: Any) -> str:
    """Return the kernel that a program calls; "" for what XLA generates."""
    text = compiled.as_text()
    return next((name for name, call in KERNELS.items() if call in text), "")


def check(shape: Shape, dtype: str) -> bool:
    """Print the errors of an attention relative to float64; return whether they are roundings."""
    arrays, others = operands(shape, dtype)
    attend = with_gradients(lambda q, k, v: attention(q, k, v, **others))
    compiled = jax.jit(attend).lower(*arrays).compile()
    pairs = zip(("output", "q", "k", "v"), compiled(*arrays), exact(shape, arrays, others), strict=True)
    errors = {
        name: float(np.sqrt(((np.asarray(x, np.float64) - y) ** 2).mean() / (y**2).mean())) for name, x, y in pairs
    }
    right = all(error <= TOLERANCE[dtype] for error in errors.values())
    emit("attention beside float64", shape=str(shape), dtype=dtype, kernel=kernel_of(compiled), right=right, **errors)
    return right


def torch_steps(shape: Shape) -> dict[str, Callable[[], None] | str]:
    """Return PyTorch's forward and backward pass by kernel, or why there is none."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [(shape.rows, heads, shape.length, shape.width) for heads in (shape.heads, shape.keys, shape.keys)]
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    cotangent = torch.randn(sizes[0], device=device, dtype=torch.bfloat16)

    def step(backend: Any) -> Callable[[], None]:
        def run() -> None:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.keys)
            torch.autograd.grad(out, (q, k, v), cotangent)
            if device.type == "cuda":
                torch.cuda.synchronize()

        return run

    found: dict[str, Callable[[], None] | str] = {}
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention", SDPBackend.FLASH_ATTENTION)):
        run = step(backend)
        try:
            run()
        except RuntimeError as error:  # of a backend that is not for these arrays or this device
            found[name] = str(error).splitlines()[0]
        else:
            found[name] = run
    return found


@dataclass(frozen=True)
class _Timed:
    step: Callable[[], object]
    prepare: Callable[[], None] = lambda: None


def measure(shape: Shape) -> None:
    """Print the time of an attention, forward and backward in bfloat16, in turns with PyTorch's kernels."""
    from benchmarks.worker import time_steps

    arrays, others = operands(shape, "bfloat16")
    compiled = jax.jit(with_gradients(lambda q, k, v: attention(q, k, v, **others))).lower(*arrays).compile()
    # PyTorch's kernels have neither segments nor the rest: the time of all pairs of a causal attention.
    theirs = torch_steps(shape)
    timed = {"jax": _Timed(lambda: jax.block_until_ready(compiled(*arrays)))}
    timed |= {name: _Timed(step) for name, step in theirs.items() if callable(step)}
    turns: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS + 1):  # of which the first warms up
        for name, step in timed.items():
            turns[name].append(float(np.median(time_steps(step, TURN, TURN_S)["wall"])))
    medians = {name: float(np.median(seconds[1:])) for name, seconds in turns.items()}
    emit(
        "attention, forward and backward",
        shape=str(shape),
        kernel=kernel_of(compiled),
        step_s=medians["jax"],
        **{f"torch_causal_{name}_s": medians.get(name) for name in theirs},
        refused={name: reason for name, reason in theirs.items() if isinstance(reason, str)} or None,
    )


def main(rehearse: bool) -> int:
    """Check, then measure; return 1 if a result is wrong."""
    wrong = 0
    for shape in REHEARSED if rehearse else RIGHT:
        for dtype in TOLERANCE:
            note(f"{shape} in {dtype}")
            wrong += not check(shape, dtype)
    for shape in REHEARSED if rehearse else TIMED:
        note(f"timing {shape}")
        measure(shape)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main("--rehearse" in sys.argv))
