"""PyTorch's own samples of its operations (`op_db`), imported and compared in float64."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from tests.torch_import.reference import weighted

BAR = 1e-10
SAMPLES = 2
"""Samples of each entry, spread over all that it has."""


def op_db() -> list[Any]:
    """Return PyTorch's table of operations, whose import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    # The import forbids to set flags such as `allow_tf32` for the rest of the process.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return list(op_db)


class Outcome(NamedTuple):
    """What became of a sample: "passed", "refused" with the reason, "no reference" or "wrong" with the difference."""

    kind: str
    detail: str = ""


class Operation(torch.nn.Module):
    """An operation as a module of the tensors among its arguments; the other arguments are part of it."""

    def __init__(self, info: Any, finished: Any, spec: Any, leaves: list[Any]) -> None:
        super().__init__()
        # The wrapper makes a valid argument, as a symmetric matrix; `finished` selects what is unique, as the
        # absolute values of eigenvectors.
        self.wrapper, self.op, self.finished, self.spec = info.gradcheck_wrapper, info.op, finished, spec
        self.slots = [(isinstance(x, torch.Tensor), None if isinstance(x, torch.Tensor) else x) for x in leaves]

    @classmethod
    def of(cls, info: Any, sample: Any) -> tuple["Operation", list[torch.Tensor]]:
        """Return the module of a sample, and its tensors."""
        leaves, spec = _pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = [x.detach().clone() for x in leaves if isinstance(x, torch.Tensor)]
        return cls(info, sample.output_process_fn_grad, spec, leaves), tensors

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if is_tensor else other for is_tensor, other in self.slots]
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return self.finished(self.wrapper(self.op, *args, **kwargs))


def outcomes(info: Any) -> Iterator[Outcome]:
    """Yield the outcome of some samples of an entry of `op_db`."""
    for sample in chosen_samples(info, torch.float64, requires_grad=True):
        yield outcome(info, sample)


def chosen_samples(info: Any, dtype: torch.dtype, *, requires_grad: bool) -> list[Any]:
    """Return some samples of an entry of `op_db`, spread over all that it has."""
    samples = [*info.sample_inputs("cpu", dtype, requires_grad=requires_grad)]
    chosen = np.unique(np.linspace(0, len(samples) - 1, SAMPLES).astype(int)) if samples else ()
    return [samples[i] for i in chosen]


def sample_sizes(info: Any, limit: int) -> list[Any]:
    """Return some samples of an entry of `op_db`: the first of those that differ most in their number of elements."""
    samples = [*info.sample_inputs("cpu", torch.float64, requires_grad=True)]
    sizes = {sum(x.numel() for x in Operation.of(info, sample)[1]): i for i, sample in reversed([*enumerate(samples)])}
    chosen = [sizes[n] for n in sorted(sizes, reverse=True)]
    return [samples[i] for i in chosen[:limit]]


def outcome(info: Any, sample: Any) -> Outcome:
    """Import one sample and compare its values and the gradients of its floating-point tensors."""
    module, tensors = Operation.of(info, sample)
    if any(x.layout != torch.strided or x.is_quantized for x in tensors):
        return Outcome("no reference", "a tensor that is not strided")
    ((_, found),) = compared_at(module, tensors, [("sample", tensors)])
    return found


def compared_at(
    module: "Operation",
    tensors: list[torch.Tensor],
    points: Iterable[tuple[str, list[torch.Tensor]]],
    *,
    elementwise: bool = False,
    values_only: bool = False,
) -> Iterator[tuple[str, Outcome]]:
    """Import an operation once and yield its outcome at each of some points, with its name."""
    model, programs = None, {}
    with jax.enable_x64():
        for name, point in points:
            reference = _reference(module, point)
            if isinstance(reference, Outcome):
                yield name, reference
                continue
            floats, expected = reference
            # Copies: some operations write to their arguments.
            arrays = tuple(x.numpy().copy() for x in point)
            try:
                model = model or from_torch(module.train(), tuple(x.numpy().copy() for x in tensors))
                program = programs.setdefault(tuple(floats), _program(model, floats))
                (_, ours), our_grads = program(arrays, tuple(x for x, d in zip(arrays, floats, strict=True) if d))
            except UserError as error:
                yield name, Outcome("refused", str(error)[:160])
                continue
            except Exception as error:
                yield name, Outcome("wrong", f"{type(error).__name__}: {str(error)[:160]}")
                continue
            values = ours if values_only else [*ours, *our_grads]
            yield name, _judged(*_defined(values, expected, len(ours), elementwise, values_only))


def _defined(
    ours: list[Any], theirs: list[torch.Tensor], outputs: int, elementwise: bool, values_only: bool
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return what is compared: where the output is NaN neither a gradient nor an index has a meaning."""
    floats = [i for i, y in enumerate(theirs[:outputs]) if y.is_floating_point() or y.is_complex()]
    undefined = any(theirs[i].isnan().any() for i in floats)
    if undefined and elementwise and not values_only and all(y.shape == theirs[0].shape for y in theirs):
        defined = ~theirs[0].isnan()
        mask = defined.numpy()
        return [ours[0], *(np.where(mask, y, 0) for y in ours[1:])], [
            theirs[0],
            *(torch.where(defined, y, 0) for y in theirs[1:]),
        ]
    if undefined or values_only:
        return [ours[i] for i in floats], [theirs[i] for i in floats]
    return ours, theirs


def _reference(module: "Operation", tensors: list[torch.Tensor]) -> tuple[list[bool], list[torch.Tensor]] | Outcome:
    """Return which tensors PyTorch differentiates, with its values and gradients."""
    for floats in _differentiable(tensors):
        try:
            given = [x.detach().clone().requires_grad_(wanted) for x, wanted in zip(tensors, floats, strict=True)]
            expected = tensors_of(module(*given))
            grads = _gradients(expected, given, floats)
            return floats, [*(y.detach() for y in expected), *grads]
        except Exception as error:
            reason = str(error)[:80]
    return Outcome("no reference", reason)


def _program(model: Any, floats: list[bool]) -> Any:
    """Return the compiled values and gradients of an imported operation, as a function of (arrays, floats of them)."""

    def run(given: Any, arrays: Any) -> Any:
        given = iter(given)
        batch = tuple(next(given) if d else x for x, d in zip(arrays, floats, strict=True))
        outputs = jax.tree.leaves(model({}, batch, jax.random.key(0), model.state)[0])
        return _weighted([y for y in outputs if jnp.issubdtype(y.dtype, jnp.inexact)], jnp), outputs

    step = jax.jit(jax.value_and_grad(run, has_aux=True))
    return lambda arrays, given: step(given, arrays)


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def _weighted(values: Any, numpy: Any) -> Any:
    """Return `weighted` of the values in float64, of complex ones of their parts."""
    parts = [part for y in values for part in ((y.real, y.imag) if is_complex(y, numpy) else (y,))]
    return weighted([y.astype(np.float64) if numpy is jnp else y.double() for y in parts], numpy)


def is_complex(y: Any, numpy: Any) -> bool:
    return bool(jnp.iscomplexobj(y)) if numpy is jnp else bool(y.is_complex())


def _differentiable(tensors: list[torch.Tensor]) -> Iterator[list[bool]]:
    """Yield which tensors to differentiate: all floating ones; where PyTorch has no gradient, the first one or none."""
    floats = [x.dtype == torch.float64 for x in tensors]
    yield floats
    yield [wanted and not any(floats[:i]) for i, wanted in enumerate(floats)]
    yield [False] * len(floats)


def _gradients(expected: list[torch.Tensor], tensors: Any, differentiable: list[bool]) -> list[torch.Tensor]:
    floats = [x for x, d in zip(tensors, differentiable, strict=True) if d]
    loss = _weighted([y for y in expected if y.is_floating_point() or y.is_complex()], torch)
    if not floats or not getattr(loss, "requires_grad", False):
        return [torch.zeros_like(x) for x in floats]
    grads = torch.autograd.grad(loss, floats, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, floats, strict=True)]


def _judged(ours: list[Any], theirs: list[torch.Tensor]) -> Outcome:
    if len(ours) != len(theirs):
        return Outcome("wrong", f"{len(ours)} results for {len(theirs)}")
    for i, (a, b) in enumerate(zip(map(_as_reals, ours), map(_as_reals, theirs), strict=True)):
        if a.shape != b.shape:
            return Outcome("wrong", f"result {i} has the shape {a.shape} for {b.shape}")
        if a.dtype.kind == "f" and b.dtype.kind == "f":
            finite = np.isfinite(b)
            scale = np.abs(b[finite]).max() if finite.any() else 1.0
            same = np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(a[np.isinf(b)], b[np.isinf(b)])
            error = np.abs(a[finite] - b[finite]).max() if finite.any() else 0.0
            if not same or not error <= BAR * max(scale, 1.0):
                return Outcome("wrong", f"result {i} is {error:.1e} apart, NaN or infinities alike: {same}")
        elif not np.array_equal(a, b):
            return Outcome("wrong", f"result {i} differs")
    return Outcome("passed")


def _as_reals(x: Any) -> np.ndarray:
    """Return an array with float32 in place of bfloat16, and parts in place of complex numbers."""
    if isinstance(x, torch.Tensor):
        x = (x.float() if x.dtype == torch.bfloat16 else x).resolve_conj().resolve_neg().numpy(force=True)
    array = np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x)
    return np.stack([array.real, array.imag]) if array.dtype.kind == "c" else array
