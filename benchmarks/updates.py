"""Optimizer updates alone, on a GPT-2's parameters: jaxtrain's, optax's and PyTorch's fused ones."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.engines import Engine, compile_twice
from benchmarks.job import Job

ENGINES = ("jax", "optax", "torch_eager")
UPDATES = ("adamw-update", "adam-update", "sgd-update")
SIZES: Mapping[str, int] = {"vocab_size": 256, "width": 256, "depth": 4, "length": 64}
"""3.3 million parameters; vocab_size=50304 width=768 depth=12 length=1024 gives GPT-2's 124 million."""


def shapes(sizes: Mapping[str, int]) -> Any:
    """Return the shapes of the model's parameters, with stacked layers."""
    from flax import nnx

    from jaxtrain.models import GPT2, GPT2Config, functional

    resolved = {**SIZES, **sizes}
    config = GPT2Config(
        vocab_size=resolved["vocab_size"],
        n_positions=resolved["length"],
        n_embd=resolved["width"],
        n_layer=resolved["depth"],
        n_head=4,
    )
    return functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))[1]


def parameters(sizes: Mapping[str, int]) -> int:
    """Return the number of parameters."""
    import jax

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(sizes)))


def engine(job: Job) -> Engine:
    """Return the engine of a job whose workload is one of `UPDATES`."""
    return _torch(job) if job.engine.startswith("torch") else _jax(job)


def _jax(job: Job) -> Engine:
    import jax
    import optax

    from jaxtrain import optim

    ours: Mapping[str, Callable[[], Any]] = {
        "adamw-update": lambda: optim.adamw(1e-3, weight_decay=0.01),
        "adam-update": lambda: optim.adam(1e-3),
        "sgd-update": lambda: optim.sgd(1e-3, momentum=0.9),
    }
    optax_optimizers: Mapping[str, Callable[[], Any]] = {
        "adamw-update": lambda: optax.adamw(1e-3, weight_decay=0.01),
        "adam-update": lambda: optax.adam(1e-3),
        "sgd-update": lambda: optax.sgd(1e-3, momentum=0.9),
    }
    optimizer = (ours if job.engine == "jax" else optax_optimizers)[job.workload]()

    def update(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    leaves, tree = jax.tree.flatten(shapes(job.sizes))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params, grads = (
        jax.tree.unflatten(
            tree, [jax.random.normal(key, leaf.shape) * scale for key, leaf in zip(keys, leaves, strict=True)]
        )
        for scale in (0.02, 1e-3)
    )
    state = params, optimizer.init(params)
    compiled, cold, warm = compile_twice(jax.jit(update, donate_argnums=(0, 1)), *state, grads)
    device = jax.local_devices()[0]

    def run_step() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(*state, grads))

    def peak_bytes() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    return Engine(run_step, [], device.device_kind, peak_bytes, cold, warm)


def _torch(job: Job) -> Engine:
    import jax
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = []
    for path, leaf in jax.tree.leaves_with_path(shapes(job.sizes)):
        # PyTorch's layers are separate tensors.
        stacked = jax.tree_util.keystr(path).startswith("['blocks']")
        for _ in range(leaf.shape[0] if stacked else 1):
            params.append(torch.nn.Parameter(torch.randn(leaf.shape[1:] if stacked else leaf.shape, device=device)))
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = {
        "adamw-update": lambda: torch.optim.AdamW(params, weight_decay=0.01, fused=True),
        "adam-update": lambda: torch.optim.Adam(params, fused=True),
        "sgd-update": lambda: torch.optim.SGD(params, momentum=0.9, fused=True),
    }[job.workload]()

    def run_step() -> None:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes() -> int | None:
        return torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    return Engine(run_step, [], device.type, peak_bytes)
