"""Which convention of PyTorch's the JAX side of a case does not follow, and what to change.

Tried are the known differences (`parity.conventions`): of the forward pass, the backward pass and the buffers in
PyTorch's program, one function's calls computed as JAX is wont to; of clipping and the optimizer on PyTorch's
gradients. The one that yields what JAX computes, to the bar of float64, is the answer.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.bars import FIRST_BAR
from parity.case import Case
from parity.compare import relative

if TYPE_CHECKING:
    from parity.conventions.optimizers import Recipe
    from parity.divergence import Divergence
    from parity.randomness import Masks
    from parity.record import Step, Tensors
    from parity.stages import Stage


@dataclass(frozen=True)
class Diagnosis:
    """What JAX `has` where PyTorch's `subject` has another convention, and the `change` to make in JAX.

    `before`: how far JAX is from PyTorch, relative; `after`: how far from PyTorch under JAX's convention.
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


def diagnose(
    case: Case,
    divergence: "Divergence | None",
    stages: "Sequence[Stage]",
    *,
    accumulate: int = 1,
    seed: int = 0,
) -> Diagnosis | None:
    """The convention that explains the first of the `stages` that differs; None if none does, or none is known to.

    The functions of the module that `divergence` names are tried first.

    >>> from parity.cases import CASES
    >>> from parity.optimizer import Optimizer
    >>> from parity.stages import stages
    >>> mlp = CASES["mlp"]()
    >>> ours = Optimizer("AdamW", mlp.optimizer.torch, replace(mlp.optimizer, eps=1e-6).jax, mlp.optimizer.moments)
    >>> wrong = replace(mlp, optimizer=ours)
    >>> print(str(diagnose(wrong, None, stages(wrong, steps=2))).split(" (")[0])
    AdamW: JAX's eps is 1e-6: eps=1e-8
    """
    from parity.randomness import dropout_masks
    from parity.stages import STEPS
    from parity.weights import with_tables

    failing = next((stage for stage in stages if not stage.holds), None)
    if failing is None:
        return None
    case = with_tables(case)
    steps = failing.step if failing.name in OF_PROGRAM else max(failing.step + 3, STEPS)
    masks = dropout_masks(case, "fp64", accumulate=accumulate, steps=steps, seed=seed)
    trial = _Trial(case, failing, accumulate, steps, seed, masks)
    with _ordinary_float64():
        return next(trial.diagnoses(divergence), None)


@dataclass(frozen=True)
class _Trial:
    """A case whose stage `failing` differs, and how it is run."""

    case: Case
    failing: "Stage"
    accumulate: int
    steps: int
    seed: int
    masks: "list[Masks]"

    def diagnoses(self, divergence: "Divergence | None") -> Iterator[Diagnosis]:
        from parity.stages import compared

        name, step = self.failing.name, self.failing.step
        seen = self._reference(self.case.torch_loss, self.steps)
        ours = {(step, stage): mine for step, stage, mine, _ in compared(self.case, seen, self.seed)}
        if name in OF_PROGRAM:
            return self._of_operations(ours[step, name], divergence)
        if name == "clipped gradients":
            return self._of_clipping(seen[step - 1], ours[step, name])
        return self._of_optimizer(seen, [ours[i, "update"] for i in range(1, self.steps + 1)])

    def _of_operations(self, ours: "Tensors", divergence: "Divergence | None") -> Iterator[Diagnosis]:
        from parity.conventions.operations import OPERATIONS
        from parity.conventions.substitution import Substitution

        unmet = (self.failing.step - 1) * self.accumulate
        module = divergence.torch.partition(": ")[0] if divergence else None
        watching = Substitution(None, frozenset(), unmet)
        self._reference(watching.watched(self.case.torch_loss), self.failing.step)
        here = {function for function, path in watching.calls if path == module}
        for convention in sorted(OPERATIONS, key=lambda convention: convention.of not in here):
            for paths in _scopes([path for function, path in watching.calls if function == convention.of], module):
                tried = Substitution(convention, paths, unmet)
                try:
                    seen = self._reference(tried.watched(self.case.torch_loss), self.failing.step)
                except Exception:
                    continue  # it does not apply here: other shapes, which the model refuses in its own way
                after = _apart(ours, OF_PROGRAM[self.failing.name](seen[-1]))
                if after <= FIRST_BAR:
                    yield self._found(convention.of, [convention], tried.arguments, after)

    def _of_clipping(self, step: "Step", ours: "Tensors") -> Iterator[Diagnosis]:
        from parity import jax_side
        from parity.conventions.clipping import CLIPPING

        table, bound = self.case.tables[0], self.case.clip_norm
        assert bound is not None
        grads = jax_side.arrays(table.to_jax(step.grads, like=self.case.params_like), "fp64")
        for convention in CLIPPING:
            after = _apart(ours, jax_side.to_torch(self.case, convention.clipped(grads, bound)))
            if after <= FIRST_BAR:
                yield self._found("clip_grad_norm_", [convention], {}, after)

    def _of_optimizer(self, seen: "Sequence[Step]", ours: "Sequence[Tensors]") -> Iterator[Diagnosis]:
        from parity import torch_side
        from parity.conventions.optimizers import recipes, variants

        right = self.case.optimizer
        optimizer = right.torch(torch_side.seeded_model(self.case, self.seed).named_parameters())
        scheduler = None if right.scheduler is None else right.scheduler(optimizer)
        found = recipes(optimizer, scheduler, self.steps)
        for conventions, of in variants([recipe for recipe, _ in found]) if found else ():
            groups = zip(of, [names for _, names in found], strict=True)
            after = max(_replayed(recipe, names, seen, ours) for recipe, names in groups)
            if after <= FIRST_BAR:
                yield self._found(found[0][0].kind, conventions, found[0][0].options, after)

    def _reference(self, loss: Any, steps: int) -> "list[Step]":
        from parity import torch_side

        seen: list[Step] = []
        case, masks = replace(self.case, torch_loss=loss), self.masks[: steps * self.accumulate]
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of conventions that it does not recommend
            torch_side.run(
                case,
                "fp64",
                accumulate=self.accumulate,
                steps=steps,
                seed=self.seed,
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
"""The stages that PyTorch's program makes, and what they are in its step."""


def _scopes(paths: Sequence[str], module: str | None) -> list[frozenset[str]]:
    """Where JAX may have a convention: wherever the function is called; else in the modules called as `module` is, one
    in each layer; or in it alone."""
    if module is None or module not in paths:
        return [frozenset(paths)] if paths else []
    namesakes = (path for path in paths if path.rpartition(".")[2] == module.rpartition(".")[2])
    return list(dict.fromkeys([frozenset(paths), frozenset(namesakes), frozenset({module})]))


def _replayed(recipe: "Recipe", names: Sequence[str], seen: "Sequence[Step]", ours: "Sequence[Tensors]") -> float:
    """How far the recipe's updates on PyTorch's gradients are from `ours`: those of the first step that differs."""
    import jax.numpy as jnp
    import optax

    def arrays(tensors: "Tensors") -> Any:
        return {name: jnp.asarray(tensors[name], float) for name in names}

    transformation = optax.with_extra_args_support(recipe.transformation())
    state, after = transformation.init(arrays(seen[0].before.params)), 0.0
    for step, update in zip(seen, ours, strict=True):
        updates, state = transformation.update(arrays(step.fed), state, arrays(step.before.params))
        theirs = {name: np.asarray(x) for name, x in updates.items()}
        after = max(after, _apart({name: update[name] for name in names}, theirs))
        if not after <= FIRST_BAR:
            break
    return after


def _apart(ours: "Tensors", theirs: "Tensors") -> float:
    return max(relative(ours, theirs).values(), default=0.0)


@contextmanager
def _ordinary_float64() -> Iterator[None]:
    """As optax expects JAX, in float64."""
    import jax

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
