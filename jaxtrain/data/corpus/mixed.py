"""Tokenized corpora as the setting `data` of a recipe names them: one folder, or several with weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxtrain.data.corpus.corpus_manifest import is_corpus
from jaxtrain.data.corpus.token_corpus import Split, TokenCorpus
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.rows.windows import CorpusRows
from jaxtrain.data.text.tokenizer import Tokenizer
from jaxtrain.errors import UserError


class CorpusMixtures(NamedTuple):
    """Rows to train on and rows that are held out, of the same corpora in the same proportions."""

    train: Mixture
    validation: Mixture


def named_corpora(data: Path | None) -> dict[Path, str]:
    """Return the folders of tokens that a setting names, with their weights; nothing if it names none.

    Args:
      data: A folder of tokens; or several with weights, as "web=0.7,code=0.3".

    Raises:
      UserError: There are weights, but a folder has none, is named twice, or is no folder of tokens.

    Example:
      >>> named_corpora(Path("texts"))
      {}
    """
    if data is None or is_corpus(data):
        return {} if data is None else {data: "1"}
    if data.exists() or "=" not in str(data):
        return {}
    corpora: dict[Path, str] = {}
    for part in str(data).split(","):
        name, _, weight = part.rpartition("=")
        folder = Path(name)
        if not name or folder in corpora:
            wrong = f"names {folder} twice" if name else f"gives {part!r} no weight"
            raise UserError(f"--data {data} {wrong}: write it as web=0.7,code=0.3")
        if not is_corpus(folder):
            raise UserError(f"{folder} in --data {data} is no folder of tokens: write one with jaxtrain data tokenize")
        corpora[folder] = weight
    return corpora


def corpus_mixtures(
    corpora: Mapping[Path, str], texts: Tokenizer, seq_len: int, packing: bool = False
) -> CorpusMixtures:
    """Open corpora as rows of `seq_len` predictions, mixed by their weights.

    Args:
      corpora: Weight of each folder of tokens.
      texts: Tokenizer that the tokens must be of.
      seq_len: Number of predictions of a row.
      packing: Whether to separate the documents of a row, as `CorpusRows` does.

    Raises:
      UserError: A folder cannot be read or is too short, its tokens are of another tokenizer, or a weight is invalid.
    """

    def mixture(split: Split) -> Mixture:
        rows = [CorpusRows(TokenCorpus(folder, split, texts), seq_len, packing) for folder in corpora]
        return Mixture(rows, [*corpora.values()])

    return CorpusMixtures(mixture("train"), mixture("validation"))
