"""Results of simple models."""

import pytest

from jaxtrain.data import bag_of_words_accuracy


def test_naive_bayes_uses_laplace_smoothing() -> None:
    """Two words favor "a", the prior favors "b"; computed by hand."""
    train = [{"text": t, "label": c} for t, c in [("x x", "a"), ("y z", "b"), ("y", "b")]]
    # p(a) (2 + 1)/(2 + 3) = 1/5 against p(b) 1/(3 + 3) = 1/9 for "x"; 1/15 against 2/9 for "z".
    held_out = [{"text": t, "label": c} for t, c in [("x", "a"), ("z", "b"), ("z", "a")]]
    assert bag_of_words_accuracy(train, held_out) == pytest.approx(2 / 3)
