"""Statistics of predictions equal their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.observe.predictions import Predictions, by_kind, by_position, calibration, confusion


def predictions(target, predicted, confidence=None, loss=None, weight=None):
    target = np.array(target, np.int32)
    ones = np.ones(target.shape, np.float32)
    given = [ones if x is None else np.array(x, np.float32) for x in (loss, weight, confidence)]
    return Predictions(given[0], given[1], target, np.array(predicted, np.int32), given[2])


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1, width=32)), min_size=1, max_size=50))
def test_the_calibration_error_equals_its_definition(pairs):
    bins, error = calibration(
        predictions([1] * len(pairs), [right for right, _ in pairs], [confidence for _, confidence in pairs])
    )
    expected = 0.0
    for low in range(10):
        inside = [(r, s) for r, s in pairs if low / 10 <= s < (low + 1) / 10 or (low == 9 and s == 1)]
        if inside:
            expected += (
                len(inside) / len(pairs) * abs(np.mean([r for r, _ in inside]) - np.mean([s for _, s in inside]))
            )
    assert sum(bin.predictions for bin in bins) == len(pairs)
    assert error == pytest.approx(expected, abs=1e-9)


def test_a_calibrated_model_has_no_calibration_error():
    calibrated = predictions([1] * 4, [1, 1, 1, 0], [0.75] * 4)
    assert calibration(calibrated)[1] == 0
    assert calibration(predictions([1] * 4, [0] * 4, [1.0] * 4))[1] == 1


def test_tokens_without_weight_are_not_counted():
    weighted = predictions(
        [[0, 1], [1, 1]], [[0, 0], [0, 0]], [[0.5, 0.9]] * 2, loss=[[1.0, 9.0], [5.0, 7.0]], weight=[[1, 0], [0, 0]]
    )
    np.testing.assert_array_equal(weighted.means(), [1.0, np.nan])
    assert weighted.worst(5).tolist() == [0]
    assert by_position(weighted) == [1.0, None]
    assert by_kind(weighted, {0: "7", 1: "x"}) == {"digits": (1, 1.0)}
    bins, error = calibration(weighted)
    assert sum(bin.predictions for bin in bins) == 1
    assert error == 0.5


def test_the_worst_examples_are_in_descending_order_of_loss():
    assert predictions([0] * 4, [0] * 4, loss=[1, 3, 3, 2]).worst(3).tolist() == [1, 2, 3]


def test_rows_of_a_confusion_matrix_are_targets():
    assert confusion(predictions([2, 0, 2], [1, 0, 1]), 3).tolist() == [[1, 0, 0], [0, 0, 0], [0, 2, 0]]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *(
            ("a", "letters"),
            ("é", "letters"),
            (" the", "letters"),
            ("7", "digits"),
            ("\n", "whitespace"),
            ("+=", "punctuation"),
        ),
        *(("x1", "mixed"), ("", "special tokens"), ("\ufffd", "partial characters")),
    ],
)
def test_tokens_are_grouped_by_kind(text, kind):
    assert [*by_kind(predictions([[0]], [[0]]), {0: text})] == [kind]
