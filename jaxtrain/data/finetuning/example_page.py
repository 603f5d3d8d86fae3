"""Rows of examples as text, with what is not in the loss in gray: a page to read before a run."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.rows.packing import PackedRows
from jaxtrain.data.rows.supervised import PreferenceRows
from jaxtrain.data.rows.whole_texts import WholeTexts
from jaxtrain.data.text.text_stream import replace_unprintable

OPEN, CLOSE = "«", "»"
"""Marks around what is in the loss, where there are no colors."""
_HALF = 400  # characters at both ends of a run
_MAX_RUNS = 12


class Run(NamedTuple):
    """Successive tokens as text, all in the loss or none of them."""

    text: str
    in_loss: bool


def decoded_runs(tokens: NDArray[np.int32], mask: NDArray[np.bool_], texts: ModelTokenizer) -> list[Run]:
    """Return the text of tokens, special ones included, in runs that are in the loss or not.

    Args:
      tokens: int32 [N].
      mask: Whether a token is in the loss, bool [N].
      texts: Tokenizer.

    Returns:
      The runs; together they are the decoded text.
    """
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    runs, before = [], ""
    for start, stop in pairwise(edges):
        # A run alone would lose, for instance, the space that its first token starts with.
        text = texts.decode_all(tokens[:stop])
        if stop > start:
            runs.append(Run(text[len(before) :], bool(mask[start])))
        before = text
    return runs


def print_examples(
    rows: PackedRows | PreferenceRows | WholeTexts,
    texts: ModelTokenizer,
    count: int = 3,
    file: TextIO | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Print the first examples as the model reads them.

    On a terminal with colors, what is not in the loss is gray; elsewhere what is in the loss stands between « and ».
    Texts for a head are printed as they are.

    Args:
      rows: Rows of `supervised_rows` or `preference_rows`, or whole texts.
      texts: Tokenizer.
      count: Number of examples to print.
      file: File to print to; None for standard output.
      labels: Names of the labels of whole texts.
    """
    stream = file or sys.stdout
    console = _color_console(stream)
    examples = _whole(rows, labels) if isinstance(rows, WholeTexts) else _examples(rows)
    for title, tokens, mask in islice(examples, count):
        runs, shown = _shortened(decoded_runs(tokens, np.ones(len(tokens), bool) if mask is None else mask, texts))
        in_loss = "" if mask is None else f", {int(mask.sum()):,} in the loss"
        heading = f"{title}: {len(tokens):,} tokens{in_loss}{shown}"
        if console is None:
            marked = (f"{OPEN}{run.text}{CLOSE}" if run.in_loss and mask is not None else run.text for run in runs)
            body = "".join(marked)
            print(f"{heading}\n{body}\n", file=stream)
            continue
        from rich.text import Text

        console.print(Text(heading, style="bold"))
        styled = ((run.text, "" if run.in_loss else "bright_black") for run in runs)
        console.print(Text.assemble(*styled), soft_wrap=True)
        console.print()


def _examples(rows: PackedRows | PreferenceRows) -> Iterator[tuple[str, NDArray[np.int32], NDArray[np.bool_]]]:
    """Yield (title, tokens, mask) of every example in the rows, in order."""
    number = 0
    for i in range(len(rows)):
        row = rows[i]
        if isinstance(rows, PreferenceRows):
            for side, title in enumerate(("chosen", "rejected")):
                one = {name: values[side] for name, values in row.items()}
                yield f"example {i + 1}, {title}", *_segment(one, 1)
        else:
            for segment in range(1, int(row["segments"].max()) + 1):
                number += 1
                yield f"example {number}, in row {i + 1}", *_segment(row, segment)


def _whole(rows: WholeTexts, labels: Sequence[str]) -> Iterator[tuple[str, NDArray[np.int32], None]]:
    """Yield (title, tokens, None) of every text."""
    for i in range(len(rows)):
        if rows.labels is None:
            for side, title in enumerate(("chosen", "rejected")):
                yield f"example {i + 1}, {title}", rows.text(i, side), None
        else:
            yield f"example {i + 1}, label {replace_unprintable(labels[rows.labels[i]])}", rows.text(i), None


def _segment(row: dict[str, Any], segment: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    (columns,) = np.nonzero(row["segments"] == segment)
    tokens = np.append(row["tokens"][columns[:1]], row["targets"][columns])
    return tokens, np.append(False, row["weight"][columns] > 0)


def _shortened(runs: list[Run]) -> tuple[list[Run], str]:
    """Return printable runs, each abbreviated in its middle, so that answers are shown after long prompts too."""
    kept = [Run(replace_unprintable(_abbreviated(text)), in_loss) for text, in_loss in runs[:_MAX_RUNS]]
    is_short = len(runs) <= _MAX_RUNS and all(len(text) <= 2 * _HALF for text, _ in runs)
    return kept, "" if is_short else "; abbreviated"


def _abbreviated(text: str) -> str:
    left_out = len(text) - 2 * _HALF
    return text if left_out <= 0 else f"{text[:_HALF]} […{left_out:,} characters…] {text[-_HALF:]}"


def _color_console(stream: TextIO) -> Any:
    """Return a console of rich for a terminal with colors, None for anything else."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream, highlight=False, force_terminal=None if stream.isatty() else False)
    has_colors = console.is_terminal and console.color_system and not console.no_color
    return console if has_colors else None
