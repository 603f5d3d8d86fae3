"""Weights of sequences in packed rows, beside explicit sums over the sequences in PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from jaxtrain.losses import cross_entropy, supervised

CLASSES = 5
# Two sequences and padding, three sequences of which one has no token in the loss, one whole row, an empty row.
LENGTHS = ((3, 4), (1, 2, 5), (8,), ())
UNMASKED = (1, 2)  # row and number of the sequence without a token in the loss


def rows(seed: int) -> dict[str, np.ndarray]:
    """Return packed rows [4, 8] with the weights of up to three sequences each."""
    draw = np.random.default_rng(seed)
    segments = np.zeros((len(LENGTHS), 8), np.int32)
    weight = (draw.random(segments.shape) < 0.7).astype(np.float32)
    for row, lengths in enumerate(LENGTHS):
        end = 0
        for number, length in enumerate(lengths, 1):
            segments[row, end : end + length] = number
            weight[row, end + length - 1] = 1
            end += length
    weight[(segments == 0) | ((segments == UNMASKED[1]) & (np.arange(4)[:, None] == UNMASKED[0]))] = 0
    return {
        "logits": draw.normal(size=(*segments.shape, CLASSES)),
        "targets": draw.integers(0, CLASSES, segments.shape).astype(np.int32),
        "weight": weight,
        "segments": segments,
        "sequence_weights": draw.uniform(0.1, 3.0, (len(LENGTHS), 3)) * (draw.random((len(LENGTHS), 3)) < 0.8),
    }


def explicit_sums(batch: dict[str, np.ndarray], logits: torch.Tensor, per_sequence: bool) -> torch.Tensor:
    """Return the mean over the sequences or their tokens, each sequence cut out of its row."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row, lengths in enumerate(LENGTHS):
        for number in range(1, len(lengths) + 1):
            chosen = (batch["segments"][row] == number) & (batch["weight"][row] > 0)
            if not chosen.any():
                continue
            of_tokens = F.cross_entropy(
                logits[row, chosen], torch.tensor(batch["targets"][row, chosen], dtype=torch.int64), reduction="none"
            )
            weight = float(batch["sequence_weights"][row, number - 1])
            total = total + weight * (of_tokens.mean() if per_sequence else of_tokens.sum())
            count += weight * (1 if per_sequence else len(of_tokens))
    return total / count


@pytest.mark.parametrize("per_sequence", [False, True])
def test_losses_and_gradients_of_packed_sequences_equal_explicit_sums(per_sequence: bool) -> None:
    def summed(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_tokens = cross_entropy(logits, batch["targets"])
        folded = batch["weight"].astype(np.float64) * jnp.take_along_axis(
            jnp.pad(batch["sequence_weights"], ((0, 0), (1, 0))), batch["segments"], axis=1
        )
        loss = supervised(
            of_tokens,
            batch["weight"],
            segments=batch["segments"],
            sequence_weights=batch["sequence_weights"],
            per_sequence=per_sequence,
        )
        # As in the rows of fine-tuning: the weights of tokens have those of their sequences as a factor.
        same = supervised(of_tokens, folded, segments=batch["segments"], per_sequence=per_sequence)
        return loss.total, (loss.weight, same.total / same.weight)

    with jax.enable_x64():
        compute = jax.jit(jax.value_and_grad(summed, has_aux=True))
        for seed in range(3):
            batch = rows(seed)
            theirs = torch.tensor(batch["logits"], requires_grad=True)
            expected = explicit_sums(batch, theirs, per_sequence)
            expected.backward()
            (total, (weight, same)), grads = compute(batch["logits"], batch)
            np.testing.assert_allclose(total / weight, expected.item(), rtol=1e-12)
            np.testing.assert_allclose(same, expected.item(), rtol=1e-12)
            np.testing.assert_allclose(grads / weight, theirs.grad.numpy(), rtol=0, atol=1e-13)
            # Micro-batches of an uneven window, the last of padding alone, add up to the same mean.
            order = [[0, 1, 2, 3], [3, 3, 3, 3]] if seed else [[2, 3, 3, 3], [1, 3, 3, 3], [0, 3, 3, 3], [3, 3, 3, 3]]
            parts = [{name: x[rows] for name, x in batch.items()} for rows in order]
            sums = [compute(part["logits"], part) for part in parts]
            window = sum(total for (total, _), _ in sums) / sum(weight for (_, (weight, _)), _ in sums)
            np.testing.assert_allclose(window, expected.item(), rtol=1e-12)
