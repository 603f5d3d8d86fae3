"""A case checked: both sides run, and the verdict on them."""

from parity.case import Case
from parity.compare import Verdict, same_meaning, same_precision
from parity.record import Record

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
REORDERINGS = 3
"""PyTorch's runs over permuted rows, from which, with the plain one, the noise of a precision is measured."""


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

    In fp64 they are to mean the same; in fp32, bf16 and fp16 JAX's is to be as near the float64 truth as PyTorch's.
    Raises `UserError` for settings that do not fit the case, and where its name table leaves a tensor over.
    """
    validate(case, precision, accumulate=accumulate, remat=remat, steps=steps)
    # Imported when something is run, so that the rest of the package answers at once.
    from parity import jax_side, torch_side

    def torch_run(precision: str, reorder: int | None = None, skip: frozenset[int] = frozenset()) -> Record:
        return torch_side.run(
            case, precision, accumulate=accumulate, steps=steps, seed=seed, reorder=reorder, skip=skip
        )

    weights = torch_side.initial_weights(case, seed)
    ours = jax_side.run(case, weights, precision, accumulate=accumulate, remat=remat, steps=steps, seed=seed)
    theirs = torch_run(precision)
    if precision == "fp64":
        return same_meaning(ours, theirs)
    reordered = [torch_run(precision, reorder=i) for i in range(REORDERINGS)]
    return same_precision(ours, [theirs, *reordered], truth=torch_run("fp64", skip=theirs.skipped))


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
        raise UserError(
            f"accumulate {accumulate} does not divide the {case.rows} rows of {case.name}: choose one of {divisors}"
        )
    rematerialise(lambda: None, remat)  # refuses a policy it does not know
