"""The order of samples: a permutation that is computed for one index at a time, and needs no memory."""

from __future__ import annotations

import functools

import numpy as np

ROUNDS = 6
MASK = (1 << 64) - 1


def shuffled(number: int, count: int, seed: int, epoch: int) -> int:
    """Where an index of ``range(count)`` goes in an order that depends on seed and epoch alone.

    A Feistel network is a permutation of a power of four; indices that leave the range walk on until they are back.

    Args:
        number: From 0 to ``count - 1``.
        count: How many there are.
        seed: Of the run.
        epoch: How often all of them came before.

    Examples:
        >>> from streamkl.distillation.order import shuffled
        >>> sorted(shuffled(n, 5, seed=0, epoch=0) for n in range(5))
        [0, 1, 2, 3, 4]
    """
    bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, keys = (1 << bits) - 1, _keys(seed, epoch)
    while True:
        left, right = number >> bits, number & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        number = left << bits | right
        if number < count:
            return number


@functools.lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(int(key) for key in np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64))


def _mix(value: int) -> int:
    """The output function of SplitMix64: every bit of the input changes half of the output's."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
