"""The examples of models with a head on the last token, as rows."""

from dataclasses import dataclass
from functools import cached_property

from jaxtrain.data import MappedSource, Source
from jaxtrain.data.finetuning import (
    ExampleFiles,
    ModelTokenizer,
    WholeTexts,
    WholeTextSummary,
    check_kind,
    encode_examples,
    encode_labelled,
    label_numbers,
    labelled_rows,
    print_examples,
    reward_rows,
)
from jaxtrain.recipes.finetuning.rows import flat_pair


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Examples of a split as rows: preferences, or texts with one of `labels`."""

    files: ExampleFiles
    texts: ModelTokenizer
    length: int
    pad: int
    labels: tuple[str, ...]

    @cached_property
    def _rows(self) -> tuple[WholeTexts, WholeTextSummary]:
        if not self.labels:
            check_kind(self.files.kind, are_pairs=True)
            return reward_rows(encode_examples(self.files, self.texts), self.length, self.pad)
        numbers = label_numbers(self.files, self.labels)
        return labelled_rows(encode_labelled(self.files, self.texts), numbers, self.labels, self.length, self.pad)

    @property
    def rows(self) -> WholeTexts:
        """The rows as they are printed."""
        return self._rows[0]

    @property
    def source(self) -> Source:
        """The rows; one of a preference has both texts one after the other."""
        return self.rows if self.labels else MappedSource(self.rows, flat_pair)

    @property
    def summary(self) -> list[str]:
        """What the rows hold of the examples, as sentences."""
        return self._rows[1].lines()

    def baselines(self) -> dict[str, str]:
        """Return the accuracy of the most frequent label."""
        counts = self._rows[1].labels
        name = max(counts, key=counts.__getitem__)
        return {"accuracy to be beaten": f"{counts[name] / len(self.rows):.3f} by the most frequent label, {name}"}

    def show(self) -> None:
        """Print the first examples, and the summary."""
        print_examples(self.rows, self.texts, labels=self.labels)
        print(*self.summary, sep="\n")
