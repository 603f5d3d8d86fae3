"""The reference: a training loop as PyTorch's users write it, observed through the optimizer's hooks.

It always runs on the CPU, so that the reference is the same on every machine.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_import import convert_tensors, lent, set_tensors, tensors_of
from parity.case import Case
from parity.oracle.caches import clear_caches
from parity.oracle.float64_constants import recompute_constants
from parity.oracle.in_torch import InFloat64
from parity.progress import report
from parity.record import Record, Snapshot, Step, Tensors, added
from parity.settings import BF16_PARAMS, EXACT, FP8, fp8_policy, in_double
from parity.sides import torch_delayed, torch_fp8
from parity.sides.param_rounding import ROUNDINGS, round_after_updates
from parity.sides.randomness import GivenMasks, Masks, mask_lines, permute_masks
from parity.sides.recomputed import without_recomputation

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = {
    "fp64": torch.float64,
    **{EXACT + name: torch.float64 for name in FP8},
    **dict.fromkeys(BF16_PARAMS, torch.bfloat16),
}
"""Dtype that model and batch are converted to, as with `model.to(dtype)`."""
COPY = {"bf16_compute": torch.bfloat16}
"""Dtype of the batch and of a copy of the model, which computes the gradients of the float32 parameters."""
SMALL = 10_000_000
"""Number of parameters up to which a model runs in one thread."""


def initial_weights(case: Case, seed: int) -> Tensors:
    """Return the float32 weights and buffers that every run of the case with this seed starts from.

    Buffers that the case's tables leave out, such as a causal mask, have no counterpart in JAX.
    """
    with seeded_model(case, seed) as model:
        found = {**model.state_dict(), **tensors_of(model, case.buffer_names)}
        tensors = {name: tensor.detach().numpy().copy() for name, tensor in found.items()}
        return with_counterpart(case, model, tensors)


def with_counterpart(case: Case, model: torch.nn.Module, tensors: Tensors) -> Tensors:
    """Return the parameters of a model among its tensors, and the buffers that the case's tables name."""
    kept = {*case.buffer_names, *(name for name, _ in model.named_parameters(remove_duplicate=False))}
    return {name: x for name, x in tensors.items() if name in kept}


class Variant(NamedTuple):
    """How a run deviates from the plain one.

    Attributes:
      reorder: Seed of a permutation of the rows of every micro-batch: the same mathematics, rounded differently.
      one_ulp: Seed of a start with every weight at the next number above or below. In fp64, whose ulp is of the size of
        an update's rounding, every update ends with such a change too.
      skip: Steps without an update, as a run that overflowed there skipped it.
    """

    reorder: int | None = None
    one_ulp: int | None = None
    skip: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """What is added to the name of the run."""
        return " with rows permuted" * (self.reorder is not None) + " with one ulp more" * (self.one_ulp is not None)


PLAIN = Variant()


def run(
    case: Case,
    precision: str,
    *,
    accumulate: int = 1,
    steps: int = 20,
    seed: int = 0,
    masks: Sequence[Masks] | None = None,
    variant: Variant = PLAIN,
    watch: Callable[[Step], None] | None = None,
) -> Record:
    """Train in PyTorch on the CPU.

    Args:
      case: The case; its `torch_model` is created from `seed`.
      precision: One of `parity.settings.PRECISIONS`.
      accumulate: Micro-batches per accumulation window.
      steps: Windows, each with one optimizer update.
      seed: Seed of weights and data.
      masks: Dropout masks of each micro-batch; None lets PyTorch draw its own.
      variant: How this run deviates from the plain one.
      watch: Called with every step.

    Returns:
      The record of the run.

    Raises:
      UserError: The micro-batches of a window have different weights, or the masks do not fit the model.
    """
    with seeded_model(case, seed) as model, few_threads(model):
        return _run(case, model, precision, accumulate, steps, seed, masks, variant, watch)


def _run(
    case: Case,
    model: torch.nn.Module,
    precision: str,
    accumulate: int,
    steps: int,
    seed: int,
    masks: Sequence[Masks] | None,
    variant: Variant,
    watch: Callable[[Step], None] | None,
) -> Record:
    model = torch_fp8.converted(case, in_dtype(case, model, WHOLE.get(precision, torch.float32)), precision)
    copied = LowPrecisionCopy(case, model, COPY[precision]) if precision in COPY else None
    computing, model = (copied.model, copied.masters) if copied else (model, model)
    optimizer = case.torch_optimizer(model)
    if variant.one_ulp is not None:
        nudge = _one_ulp_off(model, variant.one_ulp)
        nudge()
        if in_double(precision):
            optimizer.register_step_post_hook(nudge)
    scheduler = None if case.optimizer.scheduler is None else case.optimizer.scheduler(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for name, p in model.named_parameters() if scaler.is_enabled() else ():
        if p.is_complex() and p.requires_grad:
            raise UserError(
                f"the parameter {name} is complex, whose gradient PyTorch's GradScaler does not unscale: use fp64, "
                "fp32 and bf16 in place of fp16"
            )
    if precision in ROUNDINGS:
        round_after_updates(optimizer, ROUNDINGS[precision])
    optimizer.register_step_post_hook(lambda *_: torch_delayed.update_scales(model))
    updates = Updates(case, model, optimizer)
    losses, norms, scales = [], [], [scaler.get_scale()]

    for step, window in enumerate(_windows(case, precision, accumulate, steps, seed, masks, variant.reorder)):
        report(f"{precision}: PyTorch{variant}, update {step + 1} of {steps}")
        before = snapshot(case, model, optimizer) if watch else None
        optimizer.zero_grad()
        if copied:
            copied.round_params()
        window_loss, weights = torch.zeros([]), set()
        for i, (micro_batch, mask) in enumerate(window):
            _seed_others(seed, step * accumulate + i)
            with _lifted(precision):
                masked = nullcontext() if mask is None else GivenMasks(mask, partial(mask_lines, case))
                with _autocast(precision), without_recomputation(), masked:
                    total, weight = checked_loss(case.torch_loss(computing, micro_batch))
                    loss = total / weight / accumulate
                scaler.scale(loss).backward()
                if copied:
                    copied.move_gradients()
            window_loss = window_loss + loss.detach()
            weights.add(int(weight))
        _check_alike(weights, case)
        scaler.unscale_(optimizer)
        grads = _gradients(case, model) if watch else {}
        norms.append(_clip(model, case.clip_norm))
        applied = updates.count
        if step not in variant.skip:
            scaler.step(optimizer)
        scaler.update()
        if scheduler is not None and updates.count > applied:
            scheduler.step()
        losses.append(window_loss.item())
        scales.append(scaler.get_scale())
        if watch and before:
            micro_batches = [{name: x.detach().numpy() for name, x in batch.items()} for batch, _ in window]
            after = snapshot(case, model, optimizer)
            watch(Step(micro_batches, before, losses[-1], grads, _gradients(case, model), after))

    last = snapshot(case, model, optimizer)
    first = updates.first or last
    return Record(np.array(losses), updates.grads, first, last, np.array(scales), np.array(norms))


def _autocast(precision: str) -> AbstractContextManager[Any]:
    if precision in FP8:
        return torch_fp8.autocast()
    return torch.autocast("cpu", AUTOCAST[precision]) if precision in AUTOCAST else nullcontext()


def _lifted(precision: str) -> AbstractContextManager[Any]:
    """Make everything compute in float64 where the precision says so."""
    lifted = ExitStack()
    if in_double(precision):
        lifted.enter_context(InFloat64())
        if fp8_policy(precision):
            lifted.enter_context(torch_fp8.scales_in_float64())
    return lifted


def checked_loss(returned: Any) -> tuple[torch.Tensor, Any]:
    """Return what a `torch_loss` returned, (total, weight). Raises `UserError` if it is anything else."""
    match returned:
        case (torch.Tensor(shape=()) as total, int() | float() | torch.Tensor(shape=()) | np.number() as weight):
            if not total.requires_grad:
                raise UserError("the total of torch_loss does not depend on the model's parameters: return their loss")
            return total, weight
        case (torch.Tensor(shape=()), weight):
            raise UserError(f"torch_loss returned a weight that is a {type(weight).__name__}: return a number")
        case (torch.Tensor(shape=shape), _):
            raise UserError(f"torch_loss returned a total of shape {list(shape)}: return the sum, a scalar")
        case (total, _):
            raise UserError(f"torch_loss returned a total that is a {type(total).__name__}: return a tensor")
    raise UserError(f"torch_loss returned {type(returned).__name__}: return (total, weight)")


def _clip(model: torch.nn.Module, clip_norm: float | None) -> float:
    """Clip the gradients and return their norm before clipping."""
    if clip_norm is not None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


class LowPrecisionCopy:
    """A model in a low precision, which computes the gradients of a float32 copy of its parameters.

    Attributes:
      model: The model, whose parameters are rounded copies.
      masters: Modules without code, which have the float32 parameters and buffers by the same names.
    """

    def __init__(self, case: Case, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.masters = _tensors_of(model, {})
        self.model = in_dtype(case, model, dtype)
        self._changing = case.buffer_names
        pairs = zip(self.masters.named_parameters(), self.model.parameters(), strict=True)
        self._params = [(master, rounded) for (name, master), rounded in pairs if name not in self._changing]
        self._buffers = [*zip(self.masters.buffers(), self.model.buffers(), strict=True)]

    def round_params(self) -> None:
        """Copy the model's parameters to the copy."""
        with torch.no_grad():
            for master, rounded in self._params:
                rounded.copy_(master)

    def move_gradients(self) -> None:
        """Add the copy's gradients to the model's in float32, and copy its buffers and attributes to the model."""
        with torch.no_grad():
            for master, rounded in self._params:
                if rounded.grad is not None:
                    master.grad = rounded.grad.to(master.dtype) + (0 if master.grad is None else master.grad)
                    rounded.grad = None
            for buffer, converted in self._buffers:
                buffer.copy_(converted)
        set_tensors(self.masters, tensors_of(self.model, self._changing))


def _tensors_of(module: torch.nn.Module, copies: dict[int, Any]) -> torch.nn.Module:
    """Return modules without code that have copies of a module's tensors; `copies` has those that were made, by id."""
    if id(module) not in copies:
        bare = copies[id(module)] = torch.nn.Module()
        for name, p in module._parameters.items():
            if p is not None and id(p) not in copies:
                copies[id(p)] = torch.nn.Parameter(p.detach().clone(), p.requires_grad)
            bare.register_parameter(name, None if p is None else copies[id(p)])
        for name, x in module._buffers.items():
            if x is not None:
                copies.setdefault(id(x), x.detach().clone())
            bare.register_buffer(name, None if x is None else copies[id(x)])
        for name, part in module._modules.items():
            bare._modules[name] = None if part is None else _tensors_of(part, copies)
        vars(bare).update({name: x for name, x in vars(module).items() if name not in vars(bare)})
    found: torch.nn.Module = copies[id(module)]
    return found


class Updates:
    """Counts the updates of an optimizer and records the first one.

    The hooks run inside `optimizer.step()`, which GradScaler does not call for a skipped update. Every rank needs one,
    since gathering sharded tensors takes all ranks.

    Attributes:
      count: Number of updates.
      grads: Gradients of the first update, the sum of those of `Case.turns` updates; NaN before it.
      first: State after these; None before it.
    """

    def __init__(self, case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.count = 0
        self.grads = {name: np.full(p.shape, np.nan) for name, p in trained_parameters(case, model)}
        self.first: Snapshot | None = None

        def fed(*_: Any) -> None:
            if self.count < case.turns:
                self.grads = added(self.grads if self.count else None, _gradients(case, model))

        def made(*_: Any) -> None:
            self.count += 1
            if self.count <= case.turns:
                self.first = snapshot(case, model, optimizer)

        optimizer.register_step_pre_hook(fed)
        optimizer.register_step_post_hook(made)


def with_exact_constants(case: Case) -> tuple[Case, tuple[str, ...]]:
    """Return the case with the constants of its PyTorch model in float64, and their names; for float64 runs only.

    A user's own module, which cannot be built again, has none.
    """
    if case.module is not None:
        return case, ()

    def torch_model() -> torch.nn.Module:
        model = case.torch_model()
        recompute_constants(model, case.torch_model, case.buffer_names)
        return model

    changed = recompute_constants(model_of(case), lambda: model_of(case), case.buffer_names)
    return replace(case, torch_model=torch_model), changed


@contextmanager
def seeded_model(case: Case, seed: int) -> Iterator[torch.nn.Module]:
    """Yield the case's model in training mode with weights drawn from `seed`; the global generators are restored.

    A user's own module (`Case.module`) is set back on exit, so that it is yielded to one at a time.
    """
    with ExitStack() as own:
        if case.module is not None:
            if id(case.module) in _LENT:
                raise RuntimeError(f"the module of {case.name} is in use: leave that `seeded_model` first")
            _LENT.add(id(case.module))
            own.callback(_LENT.discard, id(case.module))
        own.enter_context(lent(*[] if case.module is None else [case.module]))
        yield _seeded_model(case, seed)


def model_of(case: Case) -> torch.nn.Module:
    """Return the case's model, to read its names, shapes and classes: a user's own module is set back already."""
    with seeded_model(case, 0) as model:
        return model


_LENT = set[int]()
"""Ids of the users' modules that are in use."""


def _seeded_model(case: Case, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = case.torch_model()
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"torch_model returned {type(model).__name__}: return a torch.nn.Module")
    # A model in training mode may have parts in evaluation mode, such as a frozen BatchNorm.
    model = model if model.training else model.train()
    clear_caches(model)
    return model


def in_dtype(case: Case, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert a model in place, as `model.to(dtype)`, with its state and what shares memory with its tensors.

    Imaginary parts are kept, and float64 where others become float32: the module has it on purpose.
    """
    convert_tensors(model, lambda own: _dtype(own, dtype), case.buffer_names)
    return model


def _dtype(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    if own.is_complex:
        return torch.complex128 if torch.float64 in (dtype, own.to_real()) else torch.complex64
    is_kept = not own.is_floating_point or (own, dtype) == (torch.float64, torch.float32)
    return own if is_kept else dtype


@contextmanager
def few_threads(model: torch.nn.Module) -> Iterator[None]:
    """Run a small model in one thread: its operations take less time than several threads wait for each other."""
    before = torch.get_num_threads()
    small = sum(p.numel() for p in model.parameters()) <= SMALL
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seed_others(seed: int, micro_step: int) -> None:
    """Seed NumPy and Python: a module that draws from them does so differently in each micro-batch."""
    number = int(np.random.SeedSequence([seed, micro_step]).generate_state(1)[0])
    np.random.seed(number)
    random.seed(number)


def _one_ulp_off(model: torch.nn.Module, seed: int) -> Callable[..., None]:
    """Return a function that changes every parameter to the next number of its dtype, up or down at random."""
    rng = np.random.default_rng(seed)

    def nudge(*_: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                real = torch.view_as_real(p) if p.is_complex() else p
                towards = rng.choice([-np.inf, np.inf], real.shape)
                real.copy_(torch.nextafter(real, torch.as_tensor(towards, dtype=real.dtype)))

    return nudge


def _windows(
    case: Case,
    precision: str,
    accumulate: int,
    steps: int,
    seed: int,
    masks: Sequence[Masks] | None,
    reorder: int | None,
) -> Iterator[list[tuple[dict[str, torch.Tensor], Masks | None]]]:
    """Yield the micro-batches of each window with their dropout masks."""
    shuffle = None if reorder is None else np.random.default_rng(reorder)
    for step, batch in enumerate(case.batches(seed, steps)):
        # Rows stay in their micro-batch, over which BatchNorm computes its statistics.
        rows = np.arange(case.rows).reshape(accumulate, -1)
        orders = rows if shuffle is None else shuffle.permuted(rows, axis=1)
        window = []
        for i, order in enumerate(orders, start=step * accumulate):
            mask = None if masks is None else masks[i]
            if mask is not None and shuffle is not None:
                mask = permute_masks(mask, order % len(order))
            window.append(({name: tensor(x[order], precision) for name, x in batch.items()}, mask))
        yield window


def tensor(array: np.ndarray, precision: str) -> torch.Tensor:
    """`array` as a contiguous tensor, floating ones in the dtype that a whole model is converted to for `precision`."""
    x = torch.from_numpy(np.asarray(array, order="C"))
    to = {**WHOLE, **COPY}.get(precision, torch.float32)
    # `parity.case.Batch`: every precision computes on the numbers of float32.
    return x.to(to if x.is_floating_point() else _dtype(x.dtype, to))


def _check_alike(weights: set[int], case: Case) -> None:
    # Only with equal weights is the mean over micro-batches the mean of the window.
    if len(weights) > 1:
        remedy = "draw batches that split evenly, or use accumulate 1"
        raise UserError(f"micro-batches of {case.name} have weights {sorted(weights)}: {remedy}")


def snapshot(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Return copies of the parameters, the moments and the buffers in the case's tables."""
    params, buffers = dict(trained_parameters(case, model)), tensors_of(model, case.buffer_names)
    return Snapshot(
        params={name: _array(p, p) for name, p in params.items()},
        moments={
            moment: {name: _array(p, optimizer.state[p].get(moment)) for name, p in params.items()}
            for moment in case.optimizer.moments
        },
        buffers={name: _array(buffers[name], buffers[name]) for name in case.buffer_names},
    )


def trained_parameters(case: Case, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model by name, without those that its forward pass updates."""
    changing = {*case.buffer_names}
    return ((name, p) for name, p in model.named_parameters() if name not in changing)


def _gradients(case: Case, model: torch.nn.Module) -> Tensors:
    return {name: _array(p, p.grad) for name, p in trained_parameters(case, model)}


def _array(p: torch.Tensor, tensor: torch.Tensor | None) -> np.ndarray:
    """A copy of `tensor`; zeros like `p` for the gradient and moments of a parameter that the loss does not use."""
    whole = full_tensor((torch.zeros_like(p) if tensor is None else tensor).detach()).resolve_conj()
    # NumPy has no bfloat16; float32 holds all its values.
    return (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy().copy()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor as a whole, which every rank must call; other tensors unchanged."""
    # A DTensor, whose import is slow.
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
