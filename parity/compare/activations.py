"""The outputs of a PyTorch model's modules and the same values in the JAX program, in any precision.

Values are matched in float64 by their numbers alone (`parity.compare.fingerprint`); in a low precision the same
equations compute them. A lack of precision is thereby located at the module where it begins, without annotations.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import JaxprEqn

from jaxtrain.passes import KERNEL, policy
from jaxtrain.program import operations as op
from jaxtrain.program.equations import is_call
from jaxtrain.program.recorded_values import Inside, record
from jaxtrain.program.rewrite import bind, transform
from jaxtrain.step import micro_batch_key, validated
from jaxtrain.torch_internals import pytree
from parity.bars import FIRST_BAR, RATIO_BAR
from parity.case import Case
from parity.compare.fingerprint import Trace, counterparts
from parity.divergence import Divergence, Line
from parity.oracle.in_jax import in_float64
from parity.oracle.program import program_in_float64
from parity.record import Tensors
from parity.settings import in_double
from parity.sides import jax_side, torch_side
from parity.sides.jax_lines import line_of
from parity.source import source_line
from parity.weights import with_tables


@dataclass(frozen=True)
class Activation:
    """The first output of a PyTorch module in the first micro-batch, and JAX's value of it.

    Attributes:
      module: Path of the module.
      theirs: PyTorch's value in the precision of the run, as float64.
      ours: JAX's, in its own layout.
      their_error: Relative distance of `theirs` from the same value computed in float64.
      our_error: That of `ours`.
      at: Where JAX computes it; None if unknown.
    """

    module: str
    theirs: np.ndarray
    ours: np.ndarray
    their_error: float
    our_error: float
    at: Line | None

    @property
    def error_ratio(self) -> float:
        """JAX's error in units of PyTorch's."""
        if not self.their_error:
            return np.inf if self.our_error else 1.0
        return self.our_error / self.their_error


def activations(case: Case, precision: str, *, accumulate: int = 1, seed: int = 0) -> list[Activation]:
    """Return the activations of the modules whose outputs JAX computes as well, in the order of computation.

    The case must not apply dropout, since JAX draws other masks in float64.

    Args:
      case: The case.
      precision: Precision to examine.
      accumulate: Micro-batches per accumulation window.
      seed: Seed of weights and data.

    Returns:
      The activations; empty if JAX traces another program in float64 than in `precision`.
    """
    case = with_tables(case)
    theirs, true = (_torch_outputs(case, p, accumulate, seed) for p in (precision, "fp64"))
    weights = torch_side.initial_weights(case, seed)
    values, wide = _jax_values(case, weights, "fp64", accumulate, seed)
    pairs = _matched(true, values)
    wanted = sorted(frozenset().union(*pairs.values()))
    low, narrow = _jax_values(case, weights, precision, accumulate, seed, wanted)
    if [made[:2] for made in wide] != [made[:2] for made in narrow]:
        return []
    ours = dict(zip(wanted, low, strict=True))
    found = []
    for module, equal in pairs.items():
        # The nearest of the values that are equal in float64, and of equally near ones the first: the others are steps
        # on the way to it, or copies.
        at = min(sorted(equal), key=lambda i: _error(ours[i], values[i]))
        errors = _error(theirs[module], true[module]), _error(ours[at], values[at])
        found.append(Activation(module, theirs[module], ours[at], *errors, wide[at].at))
    return found


class _Computed(NamedTuple):
    """How a value is computed: operation, shape of the result, calling line."""

    primitive: str
    shape: tuple[int, ...]
    at: Line | None


def first_imprecise(found: Sequence[Activation]) -> Divergence | None:
    """Return the first module whose output is farther from float64 than `RATIO_BAR` allows; None if there is none."""
    says = "output {ratio:.2g} times as far from float64 as PyTorch's"
    return _first(found, lambda at: at.error_ratio > RATIO_BAR, says)


def first_requantized(found: Sequence[Activation]) -> Divergence | None:
    """Return the first module whose output is not as far from float64 as PyTorch's, but for rounding in float64: both
    sides round it to 8 bits, each in its own way. None if there is none."""
    says = "output rounded to 8 bits otherwise, {ratio:.2g} times as far from float64 as PyTorch's"
    return _first(found, lambda at: not abs(at.our_error - at.their_error) <= FIRST_BAR, says)


def _first(found: Sequence[Activation], is_wrong: Callable[[Activation], bool], says: str) -> Divergence | None:
    for before, at in zip([None, *found], found, strict=False):
        if is_wrong(at):
            return Divergence(
                stage="forward",
                step=1,
                torch=f"{at.module}: {says.format(ratio=at.error_ratio)}",
                torch_source="",
                jax_source=source_line(*at.at) if at.at else "",
                last_match="its inputs" if before is None else before.module,
                parameters=(),
                torch_at=None,
                jax_at=at.at,
            )
    return None


def _torch_outputs(case: Case, precision: str, accumulate: int, seed: int) -> Tensors:
    outputs: Tensors = {}

    def watched(model: torch.nn.Module, batch: Any) -> Any:
        if outputs:
            return case.torch_loss(model, batch)
        hooks = [
            module.register_forward_hook(lambda *called, name=name: _keep(outputs, name, called[-1]))
            for name, module in model.named_modules()
            if name
        ]
        try:
            return case.torch_loss(model, batch)
        finally:
            for hook in hooks:
                hook.remove()

    torch_side.run(replace(case, torch_loss=watched), precision, accumulate=accumulate, steps=1, seed=seed)
    return outputs


def _keep(outputs: Tensors, name: str, out: Any) -> None:
    tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if tensors:
        outputs.setdefault(name, tensors[0].detach().to(torch.float64, copy=True).numpy())


def _jax_values(
    case: Case, weights: Tensors, precision: str, accumulate: int, seed: int, wanted: Collection[int] | None = None
) -> tuple[list[np.ndarray], list[_Computed]]:
    """Floating values of the loss of the first micro-batch, all or those of the given indices, and their origins."""
    with jax.enable_x64(in_double(precision)), jax.numpy_dtype_promotion("standard"):
        params, model_state = jax_side.from_torch(case, weights)
        batch = {name: x[: case.rows // accumulate] for name, x in next(case.batches(seed, 1)).items()}
        numerics, made = policy(jax_side.policy_of(precision)), list[_Computed]()
        recorded = _recorded(validated(case.loss_fn), made, wanted)
        scales = numerics.init_scales(params)
        of_kernels = None if scales is None else scales.scale
        probes = jax.tree.map(jnp.zeros_like, of_kernels)
        low = numerics.apply(recorded, state_argnums=(3,), scales=of_kernels, probes=probes)
        compute = in_float64(recorded) if precision == "fp64" else low
        compute = program_in_float64(compute) if precision != "fp64" and in_double(precision) else compute
        values = jax.jit(compute)(
            numerics.cast_params(params),
            jax_side.arrays(batch, precision),
            micro_batch_key(jax.random.key(seed), 0),
            jax_side.arrays(model_state, precision),
        )
        # NumPy has no bfloat16; float64 holds all its values.
        return [np.asarray(x, np.float64) for x in values], made


def _recorded(fn: Callable[..., Any], made: list[_Computed], wanted: Collection[int] | None) -> Callable[..., Any]:
    """Make `fn` return its intermediate values; scans are unrolled, so that each layer has its own values."""

    def recorded(*args: Any) -> list[Any]:
        found: list[Any] = []
        made.clear()

        def visit(eqn: JaxprEqn, args: list[Any], inside: Inside) -> Sequence[Any]:
            outs = bind(eqn, args)
            name = op.of(eqn)
            if name != op.CONVERT_ELEMENT_TYPE and jnp.issubdtype(outs[0].dtype, jnp.floating):
                if wanted is None or len(made) in wanted:
                    found.append(outs[0])
                # A function that JAX traced for an earlier caller has the lines of that caller.
                at = next((line for x in (eqn, *reversed(inside)) if (line := line_of(x))), None)
                made.append(_Computed(name, outs[0].shape, at))
            return outs

        transform(fn, record(visit, is_one=lambda eqn: is_call(eqn, KERNEL)))(*args)
        return found

    return recorded


def _matched(true: Tensors, values: Sequence[np.ndarray]) -> dict[str, frozenset[int]]:
    """From each module to the indices of JAX's values that equal its output."""
    theirs: Trace[Any] = Trace()
    ours: Trace[Any] = Trace()
    informative = {module: x for module, x in true.items() if x.any()}
    for x in informative.values():
        theirs.add_input(x)
    for x in values:
        ours.add_input(x)
    return {module: equal for module, equal in zip(informative, counterparts(theirs, ours), strict=True) if equal}


def _error(low: np.ndarray, true: np.ndarray) -> float:
    return float(np.linalg.norm(low - true) / np.linalg.norm(true))
