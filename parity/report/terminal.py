"""The results as a table in the terminal."""

from collections.abc import Sequence

from rich.table import Table

from parity.compare import FIRST_BAR, LAST_BAR, RATIO_BAR
from parity.report.result import Result


def bars() -> str:
    """What is asked of a case, in a line."""
    return (
        f"fp64: within {FIRST_BAR:.0e} of PyTorch after one update, {LAST_BAR:.0e} after the last. "
        f"Lower: at most {RATIO_BAR:g} times as far from float64 as PyTorch."
    )


def table(results: Sequence[Result]) -> Table:
    """A row for each check; the distances are relative to PyTorch's run."""
    rows = Table(
        "case", "precision", "k", "remat", "loss", "worst gradient", "", "parameters", "error ratio", "verdict"
    )
    for result in results:
        verdict = result.verdict
        rows.add_row(
            result.case.name,
            result.precision,
            str(result.accumulate),
            result.remat,
            f"{verdict.loss_rel:.1e}",
            f"{verdict.grad_rel_max:.1e}",
            verdict.grad_worst,
            f"{verdict.param_rel_max:.1e}",
            "" if verdict.error_ratio is None else f"{verdict.error_ratio:.2f}",
            "[green]held[/]" if verdict.passed else "[bold red]differs[/]",
        )
    return rows
