"""Seeds of attempts and turns, from the run's seed and their places: those of NumPy's `SeedSequence`, many at a time."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

FEW: Final = 4
"""Fewer seeds than these are asked of NumPy one by one."""

_POOL: Final = 4
_FIRST, _FIRST_FACTOR = 0x43B0D7E5, 0x931E8875
_LAST, _LAST_FACTOR = 0x8B51F9DD, 0x58F38DED
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_HALF: Final = np.uint32(16)
_MASK: Final = 0xFFFFFFFF


def derive_seeds(seed: int, places: Sequence[tuple[int, ...]]) -> list[int]:
    """Return for each place, numbers below 2**32 and as many in all, what `SeedSequence([seed, *place])` gives as one word of 64 bits.

    The algorithm is that of NumPy's documentation of `SeedSequence`, which M. E. O'Neill published as `seed_seq_fe`; here it runs over many
    places side by side.
    """
    if len(places) < FEW:
        return [int(np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)[0]) for place in places]
    words = [seed >> shift & _MASK for shift in range(0, max(seed.bit_length(), 1), 32)]
    columns = np.array(places, dtype=np.uint32)
    entropy = [np.full(len(places), word, dtype=np.uint32) for word in words] + [
        columns[:, place] for place in range(columns.shape[1])
    ]
    mixer = _Hash(_FIRST, _FIRST_FACTOR)
    zero = np.zeros(len(places), dtype=np.uint32)
    pool = [mixer(entropy[place] if place < len(entropy) else zero) for place in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], mixer(pool[source]))
    for word in entropy[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mix(pool[target], mixer(word))
    last = _Hash(_LAST, _LAST_FACTOR)
    low, high = last(pool[0]).astype(np.uint64), last(pool[1]).astype(np.uint64)
    seeds: list[int] = (low | high << np.uint64(32)).tolist()
    return seeds


class _Hash:
    """A hash of words whose constant is another one with every call."""

    def __init__(self, constant: int, factor: int) -> None:
        self._constant, self._factor = constant, factor

    def __call__(self, words: Words) -> Words:
        mixed: Words = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & _MASK
        mixed = mixed * np.uint32(self._constant)
        hashed: Words = mixed ^ mixed >> _HALF
        return hashed


def _mix(first: Words, second: Words) -> Words:
    mixed: Words = _LEFT * first - _RIGHT * second
    result: Words = mixed ^ mixed >> _HALF
    return result
