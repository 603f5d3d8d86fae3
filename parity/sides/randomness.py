"""Use the dropout masks that the JAX model draws in the PyTorch model as well.

Neither model is annotated. JAX's masks are the results of `_bernoulli` in the jaxpr of the loss function. In PyTorch
all dropout (modules, functions, attention) calls one operation, `bernoulli_`; only its draw is replaced, and the
arithmetic around it is PyTorch's own. Uniform and normal numbers, as of `torch.rand` and `torch.randn`, are shared
likewise.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
import torch
from jax.extend.core import JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.models.attention import drawn_mask, draws_mask
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.equations import is_call
from jaxtrain.program.recorded_values import Inside, record
from jaxtrain.program.rewrite import bind, transform
from jaxtrain.step import LossFn, micro_batch_key, validated
from jaxtrain.torch_internals import TorchDispatchMode, disable_current_modes
from parity.case import Case
from parity.oracle.in_jax import in_float64
from parity.sides.jax_lines import line_of
from parity.sides.jax_side import arrays
from parity.source import source_line

aten = torch.ops.aten

Masks = list[np.ndarray]
"""Dropout masks of one micro-batch: boolean, True where an element stays, in the order drawn and in JAX's layouts.
Other random numbers are floats."""

UNLIKELY = 0x5EED0FA11D2A35
"""A seed that no model sets."""
DRAWS = ("_bernoulli", "_uniform", "_normal", "_exponential", "_randint")
"""Names of the functions that `jax.random.bernoulli` and the functions of these numbers call under jit."""


def dropout_masks(case: Case, precision: str, *, accumulate: int, steps: int, seed: int) -> list[Masks]:
    """Return the masks of every micro-batch of `jax_side.run` with the same arguments.

    They depend on the precision: in float64 JAX draws other bits.

    Raises:
      UserError: The number of masks depends on the data.
    """
    with jax.enable_x64(precision == "fp64"), jax.numpy_dtype_promotion("standard"):
        # Shapes and the key determine the masks: zeros and one batch of each shape are enough.
        dtypes = "fp64" if precision == "fp64" else "fp32"  # other programs in float64 are traced in 32 bits
        params, model_state = arrays(jax.tree.map(_zeros, (case.params_like, case.state_like)), dtypes)
        key, masks, compiled = jax.random.key(seed), dropout_mask_fn(case.loss_fn), dict[Any, Any]()
        found: list[Masks] = []
        for step, batch in enumerate(case.batches_like(seed, steps, case.rows // accumulate)):
            given = arrays(batch, dtypes)
            shapes = tuple((name, x.shape, str(x.dtype)) for name, x in given.items())
            if shapes not in compiled:
                # Traced as the run of that precision traces the loss.
                traced = jax.jit(in_float64(masks) if precision == "fp64" else masks).trace(
                    params, given, key, model_state
                )
                # Without dropout there is nothing to compile.
                compiled[shapes] = traced.lower().compile() if traced.jaxpr.out_avals else None
            draw = compiled[shapes]
            for i in range(accumulate):
                of_micro_batch = micro_batch_key(key, step * accumulate + i)
                drawn = [] if draw is None else draw(params, given, of_micro_batch, model_state)
                found.append([np.asarray(mask) for mask in drawn])
        return found


def mask_lines(case: Case) -> list[str]:
    """Return the lines of the JAX model that draw its masks, with file and text, in order and without repetitions."""
    lines: dict[str, None] = {}

    def drawn(eqn: JaxprEqn) -> None:
        line = line_of(eqn)
        lines.update({} if line is None else {source_line(*line): None})

    with jax.numpy_dtype_promotion("standard"):
        like = jax.tree.map(_zeros, (case.params_like, case.state_like))
        params, model_state = arrays(like, "fp32")
        batch = arrays(case.batch(0, case.rows), "fp32")
        jax.eval_shape(dropout_mask_fn(case.loss_fn, drawn), params, batch, jax.random.key(0), model_state)
    return [*lines]


def dropout_mask_fn(
    loss_fn: LossFn, drawn: Callable[[JaxprEqn], None] = lambda _: None
) -> Callable[..., list[jax.Array]]:
    """Return a function from (params, batch, rng, model_state) to the masks that `loss_fn` draws, in order.

    When it is traced, it calls `drawn` with the equation of each mask.

    Raises:
      UserError: It draws in a loop or branch that depends on values.

    >>> from jaxtrain import Loss
    >>> def loss_fn(params, batch, rng):
    ...     first, second = jax.random.split(rng)
    ...     keep = jax.random.bernoulli(first, 0.5, (2, 3)) & jax.random.bernoulli(second, 0.9, (2, 1))
    ...     return Loss(jax.numpy.where(keep, params, 0.0).sum(), 1), {}
    >>> [(mask.shape, mask.dtype.name) for mask in dropout_mask_fn(loss_fn)(1.0, None, jax.random.key(0), None)]
    [((2, 3), 'bool'), ((2, 1), 'bool')]
    """

    def masks(params: Any, batch: Any, rng: Any, model_state: Any) -> list[jax.Array]:
        found: list[jax.Array] = []

        def visit(eqn: JaxprEqn, args: list[Any], _: Inside) -> Sequence[Any]:
            if draws_mask(eqn):
                drawn(eqn)
                found.append(drawn_mask(eqn, args))
            elif _is_draw(eqn):
                drawn(eqn)
                found.extend(outs := bind(eqn, args))
                return outs
            elif _draws(eqn):
                name = op.of(eqn)
                raise UserError(
                    f"a dropout mask is drawn inside {name}, where PyTorch cannot use it: use scan, or no loop"
                )
            return bind(eqn, args)

        rule = record(visit, is_one=lambda eqn: _is_draw(eqn) or not _draws(eqn))
        transform(validated(loss_fn), rule)(params, batch, rng, model_state)
        return found

    return masks


_DRAWS = {
    **{aten.bernoulli_.float: "mask", aten.bernoulli.default: "mask", aten.bernoulli.p: "mask"},
    **{aten.rand.default: "numbers", aten.rand_like.default: "numbers", aten.uniform_.default: "numbers"},
    **{aten.randn.default: "numbers", aten.randn_like.default: "numbers", aten.normal_.default: "numbers"},
    **{aten.exponential_.default: "numbers", aten.randint.default: "numbers", aten.randint.low: "numbers"},
}
"""PyTorch's operations whose results are replaced, with the kind of their result."""


class Draws(TorchDispatchMode):
    """Counts, while entered, the draws of a PyTorch model that differ between calls.

    What a model draws after it has seeded the generator itself, or from a generator of its own, is the same in each
    call: it stays as it is, in a float64 run with the numbers of float32.

    Attributes:
      drawn: Number of the draws that differ.
      own: Number of the others.

    Raises:
      UserError: Random numbers are drawn by an operation whose numbers cannot be replaced.

    >>> with Draws() as draws:
    ...     _ = torch.rand(2), torch.manual_seed(0), torch.rand(2)
    >>> draws.drawn, draws.own
    (1, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn = self.own = 0

    def __enter__(self) -> Self:
        # No draw of the given numbers moves the generator on: another state is that of a seed of the model's.
        self.outside = torch.get_rng_state()
        torch.manual_seed(UNLIKELY)
        self.state = torch.get_rng_state()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        torch.set_rng_state(self.outside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        if func in _DRAWS and (kwargs.get("generator") or not torch.equal(before, self.state)):
            self.own += 1
            return _own_draw(func, args, kwargs)
        out = func(*args, **kwargs)
        if func in _DRAWS:
            torch.set_rng_state(before)
            self.drawn += 1
            return self.replaced(out, func, args, kwargs)
        # Attention without dropout has the tag but draws nothing.
        if not torch.equal(before, torch.get_rng_state()):
            raise UserError(
                f"the PyTorch model draws random numbers by {func}: only dropout, rand, randn, randint and exponential "
                "numbers can use those of JAX"
            )
        return out

    def replaced(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the numbers to use in place of those that were drawn."""
        return out


class GivenMasks(Draws):
    """Makes PyTorch's dropout use the given masks, one after another, while entered.

    A mask fits an activation of its own shape or, with three or more axes, with its last axis in second place (NHWC to
    NCHW); a mask that fits both ways is used as it is. A mask of two axes fits where the axes before the last were
    merged.

    Args:
      masks: The masks.
      drawn_at: Returns the lines of the JAX model that draw them, for the error.

    Raises:
      UserError: A mask does not fit or, on exit, the PyTorch model drew fewer or more masks.

    >>> with GivenMasks([np.array([True, False])]):
    ...     torch.nn.functional.dropout(torch.ones(2), 0.75).tolist()
    [4.0, 0.0]
    """

    def __init__(self, masks: Masks, drawn_at: Callable[[], Sequence[str]] = list) -> None:
        super().__init__()
        self.masks, self.drawn_at = masks, drawn_at

    def replaced(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the mask that is next; beyond the last, PyTorch's own, so that the error can report their number."""
        if self.drawn > len(self.masks):
            return out
        return _scaled(_fill(out, self.masks[self.drawn - 1], func), func, *args[1:], **kwargs)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None and self.drawn != len(self.masks):
            lines = self.drawn_at()
            seeded = f" and {self.own} after it seeded its own generator, the same in each step" if self.own else ""
            raise UserError(
                f"the JAX model drew {len(self.masks)} dropout masks, the PyTorch model {self.drawn}{seeded}: "
                f"apply dropout at the same places in both{'; JAX draws at ' if lines else ''}{'; '.join(lines)}"
            )


def _own_draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw from a generator that the model seeds, in a float64 run the numbers that it draws in float32."""
    if torch.get_default_dtype() != torch.float64:
        return func(*args, **kwargs)
    if func in (aten.rand.default, aten.randn.default):
        kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
    with disable_current_modes():
        narrow = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        drawn = func(*narrow, **kwargs)
        if func._schema.is_mutable:
            return args[0].copy_(drawn)
        return drawn.double() if drawn.is_floating_point() else drawn


def _scaled(numbers: torch.Tensor, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return standard numbers with the parameters of a draw, in place."""
    if func is aten.normal_.default:
        return _normal(numbers, *args, **kwargs)
    return _exponential(numbers, *args, **kwargs) if func is aten.exponential_.default else numbers


def _normal(numbers: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return numbers.mul_(std).add_(mean)


def _exponential(numbers: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor:
    return numbers.div_(lambd)


def permute_masks(masks: Masks, order: np.ndarray) -> Masks:
    """Return the masks of a micro-batch with permuted rows: row i of the new masks is row `order[i]` of the old.

    Raises:
      UserError: The first axis of a mask has neither the rows nor the size 1.

    >>> permute_masks([np.array([True, False])], np.array([1, 0]))[0].tolist()
    [False, True]
    """
    for mask in masks:
        if mask.shape[:1] not in ((), (1,), order.shape):
            shape = list(mask.shape)
            raise UserError(
                f"the first axis of a dropout mask {shape} is not the {len(order)} rows of its micro-batch: "
                "apply dropout before rows are folded into another axis, or check in fp64 only"
            )
    return [mask[order] if mask.shape[:1] == order.shape else mask for mask in masks]


def _zeros(like: Any) -> np.ndarray:
    return np.zeros(like.shape, like.dtype)


def _is_draw(eqn: JaxprEqn) -> bool:
    return any(is_call(eqn, name) for name in DRAWS)


def _draws(eqn: JaxprEqn) -> bool:
    return any(_is_draw(inner) or draws_mask(inner) for inner in equations.within(eqn))


def _fill(noise: torch.Tensor, mask: np.ndarray, func: Any) -> torch.Tensor:
    """Write `mask` into the tensor of PyTorch's draw, in PyTorch's layout."""
    if (mask.dtype == np.bool_) != (_DRAWS[func] == "mask"):
        drawn = "a dropout mask" if mask.dtype == np.bool_ else "random numbers"
        raise UserError(f"the JAX model draws {drawn} where the PyTorch model calls {func}: draw in the same order")
    channels_second = np.moveaxis(mask, -1, 1) if mask.ndim >= 3 else mask
    for layout in (mask, channels_second):
        if layout.shape == tuple(noise.shape):
            return noise.copy_(torch.tensor(layout))
    if mask.ndim == 2 and mask.size == noise.numel() and mask.shape[-1:] == noise.shape[-1:]:
        return noise.copy_(torch.tensor(mask.reshape(noise.shape)))
    raise UserError(
        f"the JAX model's dropout mask is {list(mask.shape)}, the PyTorch model's {list(noise.shape)}: "
        "apply dropout to the same activations in the same order"
    )
