"""Which convention of PyTorch the JAX side of a case does not follow, and what to change.

The known differences (`parity.explain.conventions`) are tried one after another. For the forward pass, the backward
pass and the buffers, PyTorch's program runs again with the calls of one function computed under the other convention;
for clipping and the optimizer, the convention is applied to PyTorch's gradients. The convention that reproduces JAX's
values, within the bar of float64, is the diagnosis.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.errors import UserError
from parity.bars import FIRST_BAR
from parity.compare.verdict import relative
from parity.divergence import Divergence

if TYPE_CHECKING:
    from parity.explain.conventions.optimizers import Recipe
    from parity.explain.stages import Stage, StageRun
    from parity.record import Step, Tensors

REFUSALS = (RuntimeError, ValueError, IndexError, UserError)
"""What PyTorch raises for arguments or shapes that a function or a model cannot take, and what dropout masks raise for
activations of another shape. Any other exception is a bug of the harness and is not caught."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Diagnosis:
    """A convention of PyTorch that JAX does not follow.

    Attributes:
      subject: PyTorch's function or optimizer.
      has: What JAX has instead.
      change: The change to make in JAX.
      before: Relative distance of JAX from PyTorch.
      after: Relative distance of JAX from PyTorch under JAX's convention.
    """

    subject: str
    has: str
    change: str
    before: float
    after: float

    def __str__(self) -> str:
        """One line.

        >>> print(Diagnosis("layer_norm", "eps is 1e-06", "epsilon=1e-05", 6e-6, 3e-16))
        layer_norm: JAX's eps is 1e-6: epsilon=1e-5 (6e-6 → 3e-16)
        """
        text = f"{self.subject}: JAX's {self.has}: {self.change} ({self.before:.0e} → {self.after:.0e})"
        return text.replace("e-0", "e-").replace("e+0", "e+")


@dataclass(frozen=True)
class Untrained:
    """Parameters without a gradient in PyTorch, whose optimizers leave them alone, that JAX's optimizer changes.

    Attributes:
      subject: PyTorch's optimizer.
      names: The parameters, by PyTorch's names.
      why: Why they have no gradient.
    """

    subject: str
    names: Sequence[str]
    why: str

    def __str__(self) -> str:
        """One line.

        >>> print(Untrained("AdamW", ["wpe.weight"], "requires_grad=False"))
        wpe.weight has requires_grad=False in PyTorch; AdamW's weight decay changes it in JAX: decay the others only
        """
        has, it = ("has", "it") if len(self.names) == 1 else ("have", "them")
        return (
            f"{', '.join(self.names)} {has} {self.why} in PyTorch; "
            f"{self.subject}'s weight decay changes {it} in JAX: decay the others only"
        )


def diagnose(run: "StageRun", divergence: Divergence | None = None) -> Diagnosis | Untrained | None:
    """Return the convention that explains the stage at fault.

    How many conventions PyTorch's program refused, and why, is logged at level INFO.

    Args:
      run: The case's stages.
      divergence: Where the programs first differ, if known: the functions of its module are tried first.

    Returns:
      The diagnosis; None if all stages hold or no known convention explains the difference.

    >>> from dataclasses import replace
    >>> from parity.cases.built_in.mlp_case import case
    >>> from parity.optimizer import Optimizer
    >>> from parity.explain.stages import run_stages
    >>> mlp = case(side=8, hidden=32)
    >>> ours = Optimizer("AdamW", mlp.optimizer.torch, replace(mlp.optimizer, eps=1e-6).jax, mlp.optimizer.moments)
    >>> wrong = replace(mlp, optimizer=ours)
    >>> print(str(diagnose(run_stages(wrong, steps=2))).split(" (")[0])
    AdamW: JAX's eps is 1e-6: eps=1e-8
    """
    from parity.explain.stages import STEPS, at_fault, run_stages

    failing = at_fault(run.stages)
    if failing is None:
        return None
    # Distinguishing conventions of an optimizer takes a few steps after the first that differs.
    steps = failing.step if failing.name in OF_PROGRAM else max(failing.step + 3, STEPS)
    if len(run.steps) < steps:
        run = run_stages(run.case, accumulate=run.accumulate, steps=steps, seed=run.seed)
    trial = _Trial(run, failing, steps)
    with _default_float64():
        found = next(trial.diagnoses(divergence), None)
    if trial.refused:
        logger.info("%s: %d conventions refused by PyTorch: %s", run.case.name, len(trial.refused), trial.refused)
    return found


@dataclass(frozen=True)
class _Trial:
    """Conventions tried on a run whose stage `failing` differs.

    Attributes:
      run: The stages.
      failing: The first stage that differs.
      steps: How many steps conventions of the optimizer are compared over.
      refused: A line for each convention that PyTorch's program raised an exception under.
    """

    run: "StageRun"
    failing: "Stage"
    steps: int
    refused: list[str] = field(default_factory=list)

    def diagnoses(self, divergence: Divergence | None) -> Iterator[Diagnosis | Untrained]:
        name, step = self.failing.name, self.failing.step
        seen = self.run.steps[: self.steps]
        ours = {(step, stage): mine for step, stage, mine, _ in self.run.comparisons}
        if name in OF_PROGRAM:
            return self._of_operations(ours[step, name], divergence)
        if name == "clipped gradients":
            return self._of_clipping(seen[step - 1], ours[step, name])
        return self._of_optimizer(seen, [ours[i, "update"] for i in range(1, self.steps + 1)])

    def _of_operations(self, ours: "Tensors", divergence: Divergence | None) -> Iterator[Diagnosis]:
        from parity.explain.conventions.substitution import Substitution
        from parity.explain.conventions.torch_functions import OPERATIONS

        unchanged = (self.failing.step - 1) * self.run.accumulate
        module = divergence.torch.partition(": ")[0] if divergence else None
        watching = Substitution(None, frozenset(), unchanged)
        self._reference(watching.watched(self.run.case.torch_loss), self.failing.step)
        here = {function for function, path in watching.calls if path == module}
        for convention in sorted(OPERATIONS, key=lambda convention: convention.of not in here):
            for paths in _scopes([path for function, path in watching.calls if function == convention.of], module):
                tried = Substitution(convention, paths, unchanged)
                try:
                    seen = self._reference(tried.watched(self.run.case.torch_loss), self.failing.step)
                except REFUSALS as error:
                    self.refused.append(f"{convention.of}, {convention.has}: {type(error).__name__}: {error}")
                    continue
                after = _apart(ours, OF_PROGRAM[self.failing.name](seen[-1]))
                if after <= FIRST_BAR:
                    yield self._found(convention.of, [convention], tried.arguments, after)

    def _of_clipping(self, step: "Step", ours: "Tensors") -> Iterator[Diagnosis]:
        from parity.explain.conventions.clipping import CLIPPING
        from parity.sides import jax_side

        case = self.run.case
        table, bound = case.tables[0], case.clip_norm
        assert bound is not None
        grads = jax_side.arrays(table.to_jax(step.grads, like=case.params_like), "fp64")
        for convention in CLIPPING:
            after = _apart(ours, jax_side.to_torch(case, convention.clipped(grads, bound)))
            if after <= FIRST_BAR:
                yield self._found("clip_grad_norm_", [convention], {}, after)

    def _of_optimizer(self, seen: "Sequence[Step]", ours: "Sequence[Tensors]") -> Iterator[Diagnosis | Untrained]:
        from parity.explain.conventions.optimizers import recipes, variants
        from parity.sides import torch_side

        right = self.run.case.optimizer
        with torch_side.seeded_model(self.run.case, self.run.seed) as model:
            optimizer = self.run.case.torch_optimizer(model)
            frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
            scheduler = None if right.scheduler is None else right.scheduler(optimizer)
            found = recipes(optimizer, scheduler, self.steps)
        wrong = [name for step, mine in zip(seen, ours, strict=True) for name in _wrongly_changed(step, mine)]
        unused = [name for name in wrong if all(_is_unused(step, name) for step in seen)]
        for names, why in ((frozen, "requires_grad=False"), (unused, "no gradient")):
            if wrong and {*wrong} <= {*names}:
                yield Untrained(type(optimizer).__name__, [*dict.fromkeys(wrong)], why)
        for conventions, of in variants([recipe for recipe, _ in found]) if found else ():
            groups = zip(of, [names for _, names in found], strict=True)
            after = max(_replayed(recipe, names, seen, ours) for recipe, names in groups)
            if after <= FIRST_BAR:
                yield self._found(found[0][0].kind, conventions, found[0][0].options, after)

    def _reference(self, loss: Any, steps: int) -> "list[Step]":
        from parity.sides import torch_side

        run = self.run
        seen: list[Step] = []
        case, masks = replace(run.case, torch_loss=loss), run.masks[: steps * run.accumulate]
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of conventions that it does not recommend
            torch_side.run(
                case,
                "fp64",
                accumulate=run.accumulate,
                steps=steps,
                seed=run.seed,
                masks=masks,
                watch=seen.append,
            )
        return seen

    def _found(self, subject: str, conventions: Any, options: Mapping[str, Any], after: float) -> Diagnosis:
        has = ", its ".join(convention.has for convention in conventions)
        change = ", ".join(convention.change.format_map(options) for convention in conventions)
        return Diagnosis(subject, has, change, self.failing.distance, after)


OF_PROGRAM: "Mapping[str, Callable[[Step], Tensors]]" = {
    "loss": lambda step: {"loss": np.asarray(step.loss)},
    "gradients": lambda step: step.grads,
    "buffers": lambda step: step.after.buffers,
}
"""The stages that PyTorch's program computes, and their values in a step."""


def _scopes(paths: Sequence[str], module: str | None) -> list[frozenset[str]]:
    """The sets of modules to try a convention in: all that call the function; the namesakes of `module`, one in
    each layer; `module` alone."""
    if module is None or module not in paths:
        return [frozenset(paths)] if paths else []
    namesakes = (path for path in paths if path.rpartition(".")[2] == module.rpartition(".")[2])
    return list(dict.fromkeys([frozenset(paths), frozenset(namesakes), frozenset({module})]))


def _replayed(recipe: "Recipe", names: Sequence[str], seen: "Sequence[Step]", ours: "Sequence[Tensors]") -> float:
    """Distance of the recipe's updates on PyTorch's gradients from `ours`, at the first step that differs."""
    import jax.numpy as jnp
    import optax

    from parity.record import as_pairs

    def arrays(tensors: "Tensors") -> Any:
        return {name: jnp.asarray(as_pairs(tensors[name]), float) for name in names}

    transformation = optax.with_extra_args_support(recipe.transformation())
    state, after = transformation.init(arrays(seen[0].before.params)), 0.0
    for step, update in zip(seen, ours, strict=True):
        updates, state = transformation.update(arrays(step.fed), state, arrays(step.before.params))
        theirs = {name: np.asarray(x) for name, x in updates.items()}
        after = max(after, _apart({name: update[name] for name in names}, theirs))
        if not after <= FIRST_BAR:
            break
    return after


def _wrongly_changed(step: "Step", update: "Tensors") -> list[str]:
    """Names of the parameters whose `update` differs from PyTorch's."""
    changes = {name: x - step.before.params[name] for name, x in step.after.params.items()}
    return [name for name, distance in relative(update, changes).items() if distance > FIRST_BAR]


def _is_unused(step: "Step", name: str) -> bool:
    """Whether a parameter has no gradient, so that not even weight decay changes it."""
    return not step.grads[name].any() and np.array_equal(step.before.params[name], step.after.params[name])


def _apart(ours: "Tensors", theirs: "Tensors") -> float:
    return max(relative(ours, theirs).values(), default=0.0)


@contextmanager
def _default_float64() -> Iterator[None]:
    """JAX in float64 with its default promotions, which optax relies on."""
    import jax

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
