"""The first statement of written files whose value PyTorch does not compute, or whose gradient is another one.

PyTorch trains; at every step JAX computes its loss at PyTorch's weights, so that no difference of an earlier step is
left. Values are matched by their numbers alone, as in `parity.explain.locate`. Those that no gradient reaches, as the
values of buffers, are among them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from jaxtrain.step import micro_batch_key
from jaxtrain.torch_import import tensors_of
from jaxtrain.torch_internals import TorchDispatchMode, pytree
from parity.case import Case
from parity.compare.fingerprint import Fingerprint, apart, fingerprint, near
from parity.divergence import Line
from parity.explain.stages import to_jax
from parity.explain.statements import Bound, Statements, Values
from parity.record import Step, Tensors
from parity.sides import jax_side, torch_side
from parity.sides.randomness import Draws, Masks, dropout_masks
from parity.source import source_line


@dataclass
class Known:
    """What PyTorch computes for a micro-batch.

    Attributes:
      values: Fingerprints and sizes of all values.
      calls: Those of the results of the calls of the program, in order.
      gradients: Of these, the gradients by number, None of one that the loss does not depend on; none of one that has
        no gradient.
      buffers: The buffers before, by name.
    """

    values: list[tuple[Fingerprint, int]] = field(default_factory=list)
    calls: list[Fingerprint] = field(default_factory=list)
    gradients: dict[int, Fingerprint | None] = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The values, each as a row of its fingerprint and its size."""
        return np.array([(*value, size) for value, size in self.values])

    def add(self, tensor: torch.Tensor) -> None:
        """Add a value."""
        self.values.append((fingerprint(_array(tensor)), tensor.numel()))

    def add_call(self, tensor: torch.Tensor) -> None:
        """Add a result of a call."""
        number = len(self.calls)
        self.calls.append(fingerprint(_array(tensor)))
        if tensor.requires_grad and not tensor.is_leaf:

            def receive(gradient: torch.Tensor) -> None:
                self.gradients[number] = fingerprint(_array(gradient))

            self.gradients[number] = None
            tensor.register_hook(receive)


class _Operations(TorchDispatchMode):
    """Records the results of all operations, and what they change."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outs = func(*args, **(kwargs or {}))
        # The schema of a batch norm does not say that it changes its statistics.
        is_mutable = func._schema.is_mutable or "batch_norm" in func._schema.name
        changed = pytree.tree_leaves((args, kwargs)) if is_mutable else []
        for x in (*pytree.tree_leaves(outs), *changed):
            if isinstance(x, torch.Tensor):
                self._known.add(x)
        return outs


class _Calls(TorchFunctionMode):
    """Records the results of the calls of a program."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outs = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(outs):
            if isinstance(x, torch.Tensor):
                self._known.add_call(x)
        return outs


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().resolve_conj().resolve_neg().double().numpy()


def _watched(case: Case, found: list[Known]) -> Callable[..., Any]:
    """Return the loss of a case, whose values are recorded for each micro-batch."""

    def watched(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        own = tensors_of(model, case.buffer_names)
        known = Known(buffers={name: own[name].detach().numpy().copy() for name in case.buffer_names})
        for x in (*batch.values(), *model.parameters(), *model.buffers()):
            known.add(x)
        with _Operations(known), _Calls(known):
            total, weight = case.torch_loss(model, batch)
        for x in model.buffers():
            known.add(x)
        found.append(known)
        return total, weight

    return watched


class _Shapes(Draws):
    """Records the shapes of a model's draws, and whether they are masks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[np.ndarray] = []

    def replaced(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the numbers that were drawn."""
        is_mask = "bernoulli" in func._schema.name
        self.found.append(np.ones(tuple(out.shape), bool if is_mask else float))
        return out


@dataclass(frozen=True)
class Found:
    """A statement at fault.

    Attributes:
      line: Its first line.
      step: Training step, counted from 1.
      what: What differs: "value" or "gradient".
      place: Its number in the order of execution.
    """

    line: Line
    step: int
    what: str
    place: int

    def __str__(self) -> str:
        """One line."""
        line = source_line(*self.line)
        return f"the first statement with another {self.what} than in PyTorch, in step {self.step}: {line}"


def first_statement(case: Case, folder: Path, *, accumulate: int, steps: int, seed: int = 0) -> Found | None:
    """Return the first statement whose value PyTorch does not have, or else one whose value has another gradient.

    Args:
      case: The case.
      folder: The folder of the files.
      accumulate: Micro-batches per update.
      steps: Number of updates.
      seed: Seed of weights, data and dropout.

    Returns:
      The statement; None if there is none, as where the optimizer differs.
    """
    masks = dropout_masks(case, "fp64", accumulate=accumulate, steps=steps, seed=seed)
    draws = _drawn(case, accumulate, seed)
    if [x.shape for x in draws] == [x.shape for x in masks[0]]:
        return _judged(_observed(case, folder, masks, accumulate, steps, seed), accumulate)
    # A draw is missing: the one without which the values agree for longest.
    missing = range(len(draws)) if len(draws) == len(masks[0]) + 1 else ()
    tried = [[[*x[:i], draws[i], *x[i:]] for x in masks[:accumulate]] for i in missing]
    given: list[Sequence[Masks] | None] = [*tried] or [None]
    found = [_judged(_observed(case, folder, x, accumulate, 1, seed), accumulate) for x in given]
    return max(filter(None, found), key=lambda x: x.place, default=None)


def _drawn(case: Case, accumulate: int, seed: int) -> list[np.ndarray]:
    """Return arrays of the shapes of PyTorch's draws for a micro-batch."""
    shapes: list[list[np.ndarray]] = []

    def loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        with _Shapes() as draws:
            found = case.torch_loss(model, batch)
        shapes.append(draws.found)
        return found

    torch_side.run(replace(case, torch_loss=loss), "fp64", accumulate=accumulate, steps=1, seed=seed)
    return shapes[0]


def _observed(
    case: Case, folder: Path, masks: Sequence[Masks] | None, accumulate: int, steps: int, seed: int
) -> Iterator[tuple[Values, Known]]:
    """Yield the values of JAX's statements and those of PyTorch, for each micro-batch."""
    seen, known = list[Step](), list[Known]()
    torch_side.run(
        replace(case, torch_loss=_watched(case, known)),
        "fp64",
        accumulate=accumulate,
        steps=steps,
        seed=seed,
        masks=masks,
        watch=seen.append,
    )
    batches = ((step, batch) for step in seen for batch in step.micro_batches)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        statements, key = Statements(case, folder, accumulate), jax.random.key(seed)
        for i, (step, batch) in enumerate(batches):
            params, state = to_jax(case, step.before.params, known[i].buffers)
            yield statements(params, jax_side.arrays(batch, "fp64"), micro_batch_key(key, i), state), known[i]


def _judged(observed: Iterator[tuple[Values, Known]], accumulate: int) -> Found | None:
    """Return the first statement at fault, in the order of the first program that has one."""
    wrong: dict[tuple[Bound, ...], Found] = {}
    gradients: list[Found] = []
    for i, (values, known) in enumerate(observed):
        step, program = i // accumulate + 1, tuple(values.bound)
        with np.errstate(invalid="ignore"):  # of masks
            place = _first_value(values, known)
        if place is not None:
            found = Found(values.bound[place].line, step, "value", place)
            wrong[program] = min(wrong.get(program, found), found, key=lambda x: x.place)
        elif (place := _last_gradient(values, known)) is not None:
            gradients.append(Found(values.bound[place].line, step, "gradient", place))
    return next(iter([*wrong.values(), *gradients]), None)


def _first_value(values: Values, known: Known) -> int | None:
    """Return the number of the first value that PyTorch does not have, or of one before that should have changed."""
    at = next((i for i in range(len(values.bound)) if i in values.values and not _is_known(values, i, known)), None)
    before = None if at is None else _unchanged(values, known, at)
    return at if before is None else before


def _is_known(values: Values, i: int, known: Known) -> bool:
    value = values.values[i]
    if not np.isfinite(value.largest):  # a value without elements, or a mask
        return True
    is_near = near(value, known.table[:, :4])
    if _says_nothing(value):
        is_near &= known.table[:, 4] == values.bound[i].size
    return bool(is_near.any())


def _says_nothing(value: Fingerprint) -> bool:
    return value.squares in (0.0, 1.0) and value.squares == value.magnitudes


def _unchanged(values: Values, known: Known, at: int) -> int | None:
    """Return the number of the value just before another one, if a statement left it as it was.

    PyTorch's program has fewer values with these numbers.
    """
    i = next((i for i in reversed(range(at)) if values.bound[i].kind != "returned"), None)
    if i is None or values.bound[i].alias is None or values.bound[i].kind != "variable" or not _is_made(values, i):
        return None
    ours = sum(_is_made(values, j) for j in _equal(values, values.values[i]) if j < at)
    return i if ours > near(values.values[i], np.reshape(known.calls, (-1, 4))).sum() else None


def _is_made(values: Values, i: int) -> bool:
    """Return whether a statement computes a value that it assigns, and no function of the files does."""
    bound = values.bound
    is_called = i > 0 and bound[i - 1].kind == "returned" and bound[i].alias in (i - 1, bound[i - 1].alias)
    return bound[i].kind != "returned" and i in values.values and not is_called


def _equal(values: Values, of: Fingerprint) -> list[int]:
    """Return the numbers of the statements' values that are equal to one."""
    is_near = near(of, np.reshape([*values.values.values()], (-1, 4)))
    return sorted(i for i, found in zip(values.values, is_near, strict=True) if found)


def _last_gradient(values: Values, known: Known) -> int | None:
    """Return the number of the value after the last one whose gradient is not that of PyTorch."""
    for number in reversed([*known.gradients]):
        equal = _equal(values, known.calls[number])
        theirs = known.gradients[number] or _NOTHING
        if not equal or any(not apart(theirs, values.gradients.get(i, _NOTHING), _OF_GRADIENTS) for i in equal):
            continue
        after = [i for i in equal if values.bound[i].alias is not None and values.bound[i].kind == "variable"]
        if after:
            return after[-1]
        return next((i for i in range(equal[-1] + 1, len(values.bound)) if values.bound[i].kind != "returned"), None)
    return None


_NOTHING = fingerprint(np.zeros(1))
_OF_GRADIENTS = 1e-9
"""Relative tolerance of gradients."""
