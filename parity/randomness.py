"""The same dropout masks on both sides: those that JAX's model draws, given to PyTorch's.

Neither model is annotated. JAX's masks are found in the loss function's jaxpr, where each is what `_bernoulli`
returns; in PyTorch all of dropout comes down to one operation, `bernoulli_`, whatever called it (modules, functions,
attention), and only its draw is replaced: the arithmetic around it is PyTorch's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import JaxprEqn
from torch.utils._python_dispatch import TorchDispatchMode

from jaxtrain.errors import UserError
from jaxtrain.step import LossFn, micro_batch_key, validated
from jaxtrain.transforms.jaxpr import Run, bind, evaluate_inner, inner_jaxprs, is_call, transform, unroll_scan
from parity.case import Case
from parity.jax_side import arrays

Masks = list[np.ndarray]
"""The dropout masks of one micro-batch: boolean, True where kept, in the order drawn and in JAX's layouts."""

DRAW = "_bernoulli"
"""The function that `jax.random.bernoulli` calls under jit."""

CALLS = frozenset({"jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"})
"""The equations that do no more than evaluate their one jaxpr."""


def dropout_masks(case: Case, precision: str, *, accumulate: int, steps: int, seed: int) -> list[Masks]:
    """The masks of every micro-batch of `jax_side.run` with the same arguments.

    They depend on the precision: in double JAX draws other bits. Raises `UserError` where how many there are depends
    on the data.
    """
    with jax.enable_x64(precision == "fp64"), jax.numpy_dtype_promotion("standard"):
        # Shapes and the key decide what is drawn: zeros and one batch do for all.
        params, model_state = arrays(jax.tree.map(_zeros, (case.params_like, case.state_like)), precision)
        batch = arrays(case.batch(seed, case.rows // accumulate), precision)
        key = jax.random.key(seed)
        draw = jax.jit(drawn(case.loss_fn)).trace(params, batch, key, model_state)
        if not draw.jaxpr.out_avals:
            return [[] for _ in range(steps * accumulate)]  # without dropout there is nothing to compile
        draw = draw.lower().compile()
        keys = [micro_batch_key(key, i) for i in range(steps * accumulate)]
        return [[np.asarray(mask) for mask in draw(params, batch, key, model_state)] for key in keys]


def drawn(loss_fn: LossFn) -> Callable[..., list[jax.Array]]:
    """`masks(params, batch, rng, model_state)`: what `loss_fn` draws with `jax.random.bernoulli`, in order.

    Raises `UserError` where it draws in a loop or branch that depends on values.

    >>> from jaxtrain import Loss
    >>> def loss_fn(params, batch, rng):
    ...     first, second = jax.random.split(rng)
    ...     keep = jax.random.bernoulli(first, 0.5, (2, 3)) & jax.random.bernoulli(second, 0.9, (2, 1))
    ...     return Loss(jax.numpy.where(keep, params, 0.0).sum(), 1), {}
    >>> [(mask.shape, mask.dtype.name) for mask in drawn(loss_fn)(1.0, None, jax.random.key(0), None)]
    [((2, 3), 'bool'), ((2, 1), 'bool')]
    """

    def masks(params: Any, batch: Any, rng: Any, model_state: Any) -> list[jax.Array]:
        found: list[jax.Array] = []

        def rule(eqn: JaxprEqn, args: list[Any], run: Run) -> Sequence[Any]:
            if not _draws(eqn):
                return bind(eqn, args)
            if is_call(eqn, DRAW):
                found.extend(outs := bind(eqn, args))
                return outs
            return _inlined(eqn, args, run)

        transform(validated(loss_fn), rule)(params, batch, rng, model_state)
        return found

    return masks


class GivenMasks(TorchDispatchMode):
    """Inside it PyTorch's dropout keeps what `masks` keep, one after another.

    A mask fits an activation of its own shape or, of three axes and more, with its last axis moved to the second
    (NHWC to NCHW); where it fits both ways, as it is. One of two axes fits where those before the last were merged.
    Raises `UserError` for one that does not fit, and on leaving where PyTorch's model drew fewer or more.

    >>> with GivenMasks([np.array([True, False])]):
    ...     torch.nn.functional.dropout(torch.ones(2), 0.75).tolist()
    [4.0, 0.0]
    """

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self.masks = masks
        self.drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            self.drawn += 1
            # Beyond the last PyTorch draws its own, so that the error can say how many there were.
            if self.drawn <= len(self.masks):
                return _fill(args[0], self.masks[self.drawn - 1])
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        out = func(*args, **(kwargs or {}))
        # Attention without dropout has the tag, and draws nothing.
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            raise UserError(f"the PyTorch model draws random numbers by {func}: only dropout can be given JAX's own")
        return out

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None and self.drawn != len(self.masks):
            raise UserError(
                f"the JAX model drew {len(self.masks)} dropout masks, the PyTorch model {self.drawn}: "
                "make both drop at the same places"
            )


def reordered(masks: Masks, order: np.ndarray) -> Masks:
    """The masks of a micro-batch whose rows come in another order: row i of the new is row `order[i]` of the old.

    Raises `UserError` for a mask that has neither the rows, nor a single one for all, on its first axis.

    >>> reordered([np.array([True, False])], np.array([1, 0]))[0].tolist()
    [False, True]
    """
    for mask in masks:
        if mask.shape[:1] not in ((), (1,), order.shape):
            shape = list(mask.shape)
            raise UserError(
                f"a dropout mask {shape} has not the {len(order)} rows of its micro-batch on its first axis: "
                "drop before they are folded into another, or check in fp64 only"
            )
    return [mask[order] if mask.shape[:1] == order.shape else mask for mask in masks]


def _zeros(like: Any) -> np.ndarray:
    return np.zeros(like.shape, like.dtype)


def _draws(eqn: JaxprEqn) -> bool:
    return is_call(eqn, DRAW) or any(_draws(inner) for body in inner_jaxprs(eqn) for inner in body.eqns)


def _inlined(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    """The equation evaluated here, so that the masks drawn in it can be seen outside."""
    name = eqn.primitive.name
    if name == "scan":
        return unroll_scan(eqn, args, run)
    if name not in CALLS:
        raise UserError(
            f"a dropout mask is drawn inside {name}, where PyTorch cannot be given it: use scan, or no loop"
        )
    body = eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]
    return evaluate_inner(body, args, run)


def _fill(noise: torch.Tensor, mask: np.ndarray) -> torch.Tensor:
    """`mask` written into what PyTorch would have drawn, in PyTorch's layout."""
    channels_second = np.moveaxis(mask, -1, 1) if mask.ndim >= 3 else mask
    for layout in (mask, channels_second):
        if layout.shape == tuple(noise.shape):
            return noise.copy_(torch.tensor(layout))
    if mask.ndim == 2 and mask.size == noise.numel() and mask.shape[-1:] == noise.shape[-1:]:
        return noise.copy_(torch.tensor(mask.reshape(noise.shape)))
    raise UserError(
        f"the JAX model's dropout mask is {list(mask.shape)}, the PyTorch model's {list(noise.shape)}: "
        "make both drop the same activations in the same order"
    )
