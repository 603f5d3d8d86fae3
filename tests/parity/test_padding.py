"""A padding row that no input shows to be untrained is reported."""

from typing import Any

import pytest
import torch

from parity.cases.built_in import bert_case
from parity.run import Settings, live_reference
from parity.unexercised.coverage import Coverage
from parity.unexercised.padding import padding_rows, untested_padding

PADDING = 0
WORDS = "bert.embeddings.word_embeddings.weight"


def with_tokens(change: Any) -> Any:
    """Return BERT's classifier on batches whose tokens are changed by `change(tokens, mask)`."""
    import dataclasses

    case = bert_case.classifier()

    def batch(seed: int, rows: int) -> Any:
        drawn = case.batch(seed, rows)
        return {**drawn, "token": change(drawn["token"], drawn["mask"])}

    return dataclasses.replace(case, batch=batch)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tokens, mask: tokens, []),
        (
            lambda tokens, mask: tokens + (tokens == PADDING),
            [f"the padding row of {WORDS} is never an input: whether it is trained is not checked"],
        ),
        (
            lambda tokens, mask: tokens + (tokens == PADDING) * (mask == 1),
            [
                f"the padding row of {WORDS} is an input only where the loss does not depend on it: "
                "whether it is trained is not checked"
            ],
        ),
    ],
)
def test_a_padding_row_is_reported_unless_the_loss_depends_on_it_as_an_input(change: Any, expected: list[str]) -> None:
    assert list(untested_padding(with_tokens(change))) == expected


def test_the_padding_row_is_not_one_that_never_had_a_gradient() -> None:
    case, coverage = bert_case.classifier(), Coverage()
    live_reference(case, "fp64", Settings(steps=4), coverage)
    assert not coverage.reached[WORDS][PADDING].any()
    assert not any(line.startswith(WORDS) for line in coverage.not_exercised(case))


def test_embeddings_without_a_padding_row_and_frozen_ones_have_none() -> None:
    frozen = torch.nn.Embedding(5, 2, padding_idx=1)
    frozen.weight = torch.nn.Parameter(frozen.weight, requires_grad=False)
    model = torch.nn.ModuleDict({"plain": torch.nn.Embedding(5, 2), "last": torch.nn.Embedding(5, 2, padding_idx=-1)})
    assert padding_rows(model) == {"last.weight": 4}
