"""Scores of generated answers: exact match and ROUGE-L."""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

import jaxtrain as jt

EXACT_MATCH, ROUGE_L = "exact_match", "rouge_l"
INSTALL = "pip install 'jaxtrain[finetune]'"


def has_rouge() -> bool:
    """Return whether ROUGE-L can be computed: whether `rouge-score` is installed."""
    return importlib.util.find_spec("rouge_score") is not None


def answer_scores(generated: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Return the mean scores of answers.

    Args:
      generated: Texts that the model wrote, at least one.
      expected: The answers of the examples.

    Returns:
      `exact_match`, the share of texts that are equal but for white space around them; and, where `rouge-score` is
      installed, `rouge_l`, the F-measure of the longest common subsequence of words (Lin 2004), without stemming as in
      `evaluate`.
    """
    pairs = [*zip(generated, expected, strict=True)]
    found = {EXACT_MATCH: float(np.mean([text.strip() == answer.strip() for text, answer in pairs]))}
    if has_rouge():
        found[ROUGE_L] = float(np.mean([_scorer().score(answer, text)["rougeL"].fmeasure for text, answer in pairs]))
    return found


def check_best_metric(name: str, scored: int | None) -> None:
    """Raise `UserError` for a metric of answers that evaluations will not have.

    Args:
      name: Name of the metric.
      scored: Number of answers that are scored; None for none.
    """
    if name in (EXACT_MATCH, ROUGE_L) and not scored:
        raise jt.UserError(f"best_metric {name} needs scored answers: omit --scored-answers None, or use loss")
    if name == ROUGE_L and not has_rouge():
        raise jt.UserError(f"best_metric {name} needs rouge-score: {INSTALL}, or use exact_match")


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"])
