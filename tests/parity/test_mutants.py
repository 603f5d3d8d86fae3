"""The cases of the planted bugs: one without its bug equals PyTorch in float64, and each bug changes it."""

from collections.abc import Sequence

import torch

from parity.mutants import constants, kinks, layers, losses, models
from parity.mutants.mutant import Mutant
from tests.parity.both_sides import distances, in_pytorch

EQUAL, DIFFERENT = 1e-8, 1e-5
SLOPES_SINCE_2_14 = {"clamp-at-its-ends"} if torch.__version__ >= "2.14" else set()
"""PyTorch 2.14's clamp has the slope 0 at its bounds."""


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
