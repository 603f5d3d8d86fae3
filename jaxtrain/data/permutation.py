"""Pseudorandom permutations of any size, computed entry by entry.

grain's `index_shuffle` is one too and was not adopted: it takes one number a call, and with four rounds consecutive
numbers of a size like 2^40 stay close to each other. A permutation in memory would take 8 bytes a row in every process.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from jaxtrain.errors import UserError

_ROUNDS = 8
_U64 = np.uint64


@dataclass(frozen=True)
class Permutation:
    """Permutation of 0 to size - 1, determined by a key and computed entry by entry: nothing of its size is stored.

    It is a Feistel network over the numbers of as many bits as `size` needs, applied again to numbers that are out of
    range (cycle walking), fewer than twice on average.

    Args:
      size: Number of entries, at least 1 and at most 2^62.
      key: What determines the permutation, such as a seed and the number of an epoch.

    Raises:
      UserError: The size is out of range.

    References:
      Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom functions (1988); Black and
      Rogaway, Ciphers with arbitrary finite domains (2002).

    Example:
      >>> permutation = Permutation(10**12, key=(0, 1))
      >>> permutation(np.arange(3)).tolist()
      [43302488538, 151507150640, 819828325325]
      >>> sorted(Permutation(5, key=(7,))(np.arange(5)).tolist())
      [0, 1, 2, 3, 4]
    """

    size: int
    key: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 2**62:
            raise UserError(f"the size of a permutation must be between 1 and 2^62, got {self.size}")

    def __call__(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entries of the given numbers, int64, each from 0 to size - 1."""
        entries = self._encrypted(np.asarray(numbers).astype(_U64))
        while (outside := entries >= _U64(self.size)).any():
            entries[outside] = self._encrypted(entries[outside])
        return entries.astype(np.int64)

    def _encrypted(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits = max(2, (self.size - 1).bit_length()) // 2
        high_bits = max(2, (self.size - 1).bit_length()) - low_bits
        low_mask, high_mask = _U64(2**low_bits - 1), _U64(2**high_bits - 1)
        high, low = numbers >> _U64(low_bits), numbers & low_mask
        for i, key in enumerate(self._round_keys):
            if i % 2:
                high ^= _mixed(low, key) & high_mask
            else:
                low ^= _mixed(high, key) & low_mask
        return (high << _U64(low_bits)) | low

    @cached_property
    def _round_keys(self) -> NDArray[np.uint64]:
        text = ",".join(map(str, (self.size, *self.key)))
        return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest(), "<u8")


def _mixed(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return a hash of each number: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = half + key
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))
