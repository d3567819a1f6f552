"""Orders that need no memory: a permutation whose every entry can be computed alone.

A shuffled list of five million pairs is 40 MB, and finding one's place in it again after a kill means shuffling it
again. A Feistel network over the indices (Luby and Rackoff 1988) is a bijection whatever its round function, so entry
`i` of the permutation is a few multiplications on `i`. All of it is integer arithmetic written out here: the same seed
gives the same order with any version of any library, on any machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


def key_of(*parts: int) -> int:
    """64 bits that depend on each of the integers and on their order."""
    key = 0
    for part in parts:
        word = ((key ^ (part & _MASK)) + _GOLDEN) & _MASK  # as `_mix`, on one integer
        word = (word ^ (word >> 30)) * _FACTORS[0] & _MASK
        word = (word ^ (word >> 27)) * _FACTORS[1] & _MASK
        key = word ^ (word >> 31)
    return key


def keys(numbers: Ids, key: int) -> list[int]:
    """A 64-bit key for each of the numbers ([n]), of its own under each `key`."""
    return [int(word) for word in _mix(numbers.astype(np.uint64) ^ np.uint64(key))]


def permuted(positions: Ids, size: int, key: int) -> Ids:
    """What stands at the given positions ([n], 0..size-1) of the permutation of `range(size)` that `key` names."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    rounds = [np.uint64(key_of(key, turn)) for turn in range(_ROUNDS)]
    low = np.uint64(2**half - 1)
    result = positions.astype(np.uint64)
    # The network permutes 0..4^half-1; an entry outside the range walks on along its cycle until it is inside.
    outside = np.arange(len(result))
    words = result
    while len(outside):
        left, right = words >> np.uint64(half), words & low
        for word in rounds:
            left, right = right, left ^ (_mix(right ^ word) & low)
        words = (left << np.uint64(half)) | right
        result[outside] = words
        still = words >= size
        outside, words = outside[still], words[still]
    return result.astype(np.int64)


def shuffled(size: int, key: int) -> Ids:
    """`range(size)` in the order named by `key`."""
    return np.argsort(_mix(np.arange(size, dtype=np.uint64) ^ np.uint64(key)), kind="stable").astype(np.int64)


def _mix(words: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): each bit in touches each bit out."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(_GOLDEN)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(_FACTORS[0])
        words = (words ^ (words >> np.uint64(27))) * np.uint64(_FACTORS[1])
        return words ^ (words >> np.uint64(31))
