"""Inputs of masked language modeling."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data import ByteTokenizer
from jaxtrain.losses import mask_tokens

MASK = ByteTokenizer().special("mask")


def masked_tokens(count: int, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = jnp.arange(count, dtype=np.int32) % 100
    keys = jax.random.key(3)
    seen, predicted = mask_tokens(keys, tokens, tokens != 50, mask=MASK, vocabulary=260, share=share)
    return np.asarray(tokens), np.asarray(seen), np.asarray(predicted)


def test_tokens_are_masked_in_the_proportions_of_the_paper() -> None:
    count = 200_000
    tokens, seen, predicted = masked_tokens(count, 0.15)
    assert (seen[~predicted] == tokens[~predicted]).all()
    assert not predicted[tokens == 50].any()  # padding is not predicted
    hidden, same = seen == MASK, seen == tokens
    count_predicted = predicted.sum()
    shares = [predicted.mean() / 0.99, *((kind & predicted).sum() / count_predicted for kind in (hidden, same))]
    # A tenth is replaced by one of 260 tokens, possibly the mask or the token itself.
    expected = [0.15, 0.8 + 0.1 / 260, 0.1 + 0.1 / 260]
    for share, of, n in zip(shares, expected, [count, count_predicted, count_predicted], strict=True):
        assert abs(share - of) < 5 * (of * (1 - of) / n) ** 0.5
    replaced = seen[predicted & ~hidden & ~same]
    assert np.unique(replaced).size > 250
    assert replaced.max() < 260
