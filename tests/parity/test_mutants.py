"""The cases of the planted bugs: one without its bug equals PyTorch in float64, and each bug changes it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity.case import Case
from parity.mutants import constants, kinks, layers, losses, models
from parity.mutants.mutant import Mutant
from parity.oracle.compiled import jit
from parity.oracle.in_torch import InFloat64
from parity.torch_side import in_dtype, seeded_model, tensor

EQUAL, DIFFERENT = 1e-8, 1e-5
SLOPES_SINCE_2_14 = {"clamp-at-its-ends"} if torch.__version__ >= "2.14" else set()
"""PyTorch 2.14's clamp has the slope 0 at its bounds."""


def in_pytorch(case: Case) -> tuple[Any, Any]:
    """Return JAX's arguments, and PyTorch's total, weight, gradients and new buffers."""
    batch = {name: x.astype(float) if x.dtype == np.float32 else x for name, x in case.batch(0, case.rows).items()}
    with seeded_model(case, 0) as model:
        in_dtype(case, model, torch.float64)
        params = {name: p.numpy(force=True).copy() for name, p in model.named_parameters()}
        state = {name: x.numpy().copy() for name, x in model.named_buffers()}
        with InFloat64():
            total, weight = case.torch_loss(model, {name: tensor(x, "fp64") for name, x in batch.items()})
        total.backward()
        grads = {
            name: np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy() for name, p in model.named_parameters()
        }
        buffers = {name: x.numpy().copy() for name, x in model.named_buffers()}
        return (params, batch, state), (total.item(), float(weight), grads, buffers)


def in_jax(case: Case, params: Any, batch: Any, state: Any, graded: bool) -> Any:
    """Return total, weight, gradients and new buffers."""

    def loss(params: Any) -> Any:
        found, _, *new = case.loss_fn(params, batch, jax.random.key(0), *([state] if state else []))
        return found.total, (jnp.asarray(found.weight, float), new[0] if new else {})

    if graded:
        (total, (weight, new)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return total, weight, grads, new
    total, (weight, new) = loss(params)
    return total, weight, None, new


def distances(cases: Sequence[Case], theirs: Sequence[Any], graded: bool) -> list[float]:
    """Return how far each case is from PyTorch, all in one program, which compiles faster than each by itself."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        program = jit(lambda given: [in_jax(case, *of, graded) for case, of in zip(cases, given, strict=True)])
        ours = jax.tree.map(np.asarray, program([given for given, _ in theirs]))
    found = [(total, weight, grads if graded else None, new) for _, (total, weight, grads, new) in theirs]
    return [max(jax.tree.leaves(jax.tree.map(apart, x, y))) for x, y in zip(ours, found, strict=True)]


def apart(x: Any, y: Any) -> float:
    return float(np.nan_to_num(np.abs(x - y).max() / (np.abs(y).max() + 1e-9), nan=np.inf))


def check(mutants: Sequence[Mutant]) -> None:
    """Compare the values of all cases and bugs, and the gradients of bugs that have the right values."""
    # PyTorch draws dropout masks of its own.
    mutants = [x for x in mutants if "dropout" not in x.name and x.name not in SLOPES_SINCE_2_14]
    clean = {mutant.clean: mutant.clean() for mutant in mutants}
    theirs = {key: in_pytorch(case) for key, case in clean.items()}
    wrong = [mutant.case() for mutant in mutants]
    found = distances([*clean.values(), *wrong], [*theirs.values(), *(theirs[x.clean] for x in mutants)], graded=False)
    assert max(found[: len(clean)]) < EQUAL, [*zip(found, (case.name for case in clean.values()), strict=False)]
    hidden = [i for i, d in enumerate(found[len(clean) :]) if d <= DIFFERENT]
    if not hidden:
        return
    cases = [case for i in hidden for case in (clean[mutants[i].clean], wrong[i])]
    found = distances(cases, [theirs[mutants[i].clean] for i in hidden for _ in range(2)], graded=True)
    assert max(found[::2]) < EQUAL
    assert min(found[1::2]) > DIFFERENT, [mutants[i].name for i in hidden]


def between(first: str, last: str) -> list[Mutant]:
    """Return the mutants of layers from one to another, by name."""
    names = [mutant.name for mutant in layers.MUTANTS]
    return layers.MUTANTS[names.index(first) : names.index(last) + 1]


def test_norms_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(between("layer-norm-eps", "std-ddof"))


def test_layers_of_images_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(between("conv-same-is-asymmetric", "nearest-half-pixel"))


def test_recurrences_and_attention_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(between("gelu-tanh", layers.MUTANTS[-1].name))


def test_losses_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(losses.MUTANTS)


def test_positions_and_tied_tables_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check([*models.MUTANTS, *constants.MUTANTS])


def test_slopes_at_kinks_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(kinks.MUTANTS)
