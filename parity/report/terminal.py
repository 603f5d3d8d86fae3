"""Results as a table in the terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from parity.bars import FIRST_BAR, FP8_RATIO_BAR, LAST_BAR, RATIO_BAR
from parity.divergence import Divergence
from parity.report.result import Result


def bars() -> str:
    """Return the bars of a check in one line."""
    return (
        f"fp64: within {FIRST_BAR:.0e} of PyTorch after one update, {LAST_BAR:.0e} after the last. "
        f"Lower: at most {RATIO_BAR:g} times as far from float64 as PyTorch, in fp8 {FP8_RATIO_BAR:g} times, and "
        f"{RATIO_BAR:g} times in each gradient and buffer of fp32, bf16 and fp16."
    )


def table(results: Sequence[Result]) -> Table:
    """Return a table with a row for each check; distances are relative to PyTorch's run."""
    rows = Table(
        "case", "precision", "k", "remat", "loss", "worst gradient", "", "parameters", "error ratio", "verdict"
    )
    for result in results:
        verdict = result.verdict
        rows.add_row(
            result.case.name,
            result.precision,
            str(result.settings.accumulate),
            result.settings.remat,
            f"{verdict.loss_rel:.1e}",
            f"{verdict.grad_rel_max:.1e}",
            verdict.grad_worst,
            f"{verdict.param_rel_max:.1e}",
            "" if verdict.error_ratio is None else f"{verdict.error_ratio:.2f}",
            "[green]held[/]" if verdict.passed else "[bold red]differs[/]",
        )
    return rows


def divergence(found: Divergence) -> Text:
    """Format the first difference: both lines, and the last agreement."""
    more = len(found.parameters) - 4
    lines = {
        f"{found.stage} of step {found.step}": found.torch,
        "in PyTorch": found.torch_source,
        "module": found.torch_built,
        "in JAX": found.jax_source,
        "assigned": found.jax_built,
        "last agreement": found.last_match,
        "wrong gradients": ", ".join([*found.parameters[:4], *([f"{more} more"] if more > 0 else [])]),
    }
    shown = [(what, text) for what, text in lines.items() if text]
    width = max(len(what) for what, _ in shown)
    rows = [
        Text.assemble((f"  {what:{width}}  ", "dim"), (text, "bold red" if i == 0 else ""))
        for i, (what, text) in enumerate(shown)
    ]
    return Text("\n").join(rows)
