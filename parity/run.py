"""A case checked: both sides run, and the verdict on them."""

from functools import partial

from parity.case import Case
from parity.compare import Verdict, median, same_meaning, same_precision

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16_params")
REORDERINGS = 3
"""PyTorch's runs over permuted rows: the farthest of them and of the plain one measures a precision's noise."""
TRAININGS = 5
"""Trainings, each from its own weights and data, whose median is a low precision's verdict where the first fails."""


def check(
    case: Case,
    precision: str = "fp64",
    *,
    accumulate: int = 1,
    remat: str = "none",
    steps: int = 20,
    seed: int = 0,
) -> Verdict:
    """Train `case` in PyTorch and in JAX, and say whether the two runs are the same.

    In fp64 they are to mean the same; in the others JAX's is to be as near the float64 truth as PyTorch's.
    PyTorch's dropout is given the masks that JAX draws.
    Raises `UserError` for settings that do not fit the case, and where its name table leaves a tensor over.
    """
    validate(case, precision, accumulate=accumulate, remat=remat, steps=steps)
    # Imported when something is run, so that listing the cases, or a mistyped one, is answered at once.
    from parity import jax_side, torch_side
    from parity.randomness import dropout_masks

    def training(seed: int) -> Verdict:
        masks = dropout_masks(case, precision, accumulate=accumulate, steps=steps, seed=seed)
        torch_run = partial(torch_side.run, case, accumulate=accumulate, steps=steps, seed=seed, masks=masks)
        weights = torch_side.initial_weights(case, seed)
        ours = jax_side.run(case, weights, precision, accumulate=accumulate, remat=remat, steps=steps, seed=seed)
        theirs = torch_run(precision)
        if precision == "fp64":
            return same_meaning(ours, theirs)
        reordered = [torch_run(precision, reorder=i) for i in range(REORDERINGS)]
        return same_precision(ours, [theirs, *reordered], truth=torch_run("fp64", skip=theirs.skipped))

    verdict = training(seed)
    if verdict.passed or precision == "fp64":
        return verdict
    # Rounding has discrete consequences: one ReLU's input on the other side of zero, one run a hundred times as far
    # from the truth. A lack of precision is there in every training, such a chance in few.
    return median([verdict, *(training(seed + i) for i in range(1, TRAININGS))])


def validate(case: Case, precision: str, *, accumulate: int, remat: str, steps: int) -> None:
    """Raises `UserError` for the first setting that does not fit `case`."""
    from jaxtrain.errors import UserError
    from jaxtrain.remat import remat as rematerialise

    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
    if steps < 1:
        raise UserError(f"steps {steps} train nothing: make it 1 or more")
    if accumulate < 1 or case.rows % accumulate:
        divisors = ", ".join(str(k) for k in range(1, case.rows + 1) if case.rows % k == 0)
        rows = f"the {case.rows} rows of {case.name}"
        raise UserError(f"accumulate {accumulate} does not divide {rows}: choose one of {divisors}")
    rematerialise(lambda: None, remat)  # refuses a policy it does not know
