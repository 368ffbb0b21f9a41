"""Memory that a loop builds its batches into again and again."""

import math
from collections import deque

import numpy as np
from attrs import define, field
from attrs.validators import ge

from skyrl_engine.contracts.ragged import AnyArray


@define
class ReusableBuffers:
    """The `Buffers` of a loop: per field name `generations` pieces of memory in turn, grown when a batch is larger, never shrunk.

    A batch built into it stays whole while the next `generations - 1` batches are built; after that its memory is written again.
    """

    generations: int = field(default=2, validator=ge(1))
    _rings: dict[str, deque[AnyArray]] = field(factory=dict, init=False, repr=False)

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> AnyArray:
        """A C-contiguous, uninitialised array of this shape and dtype, in the oldest memory of this name."""
        ring = self._rings.setdefault(name, deque(np.empty(0, dtype=np.uint8) for _ in range(self.generations)))
        needed = math.prod(shape) * np.dtype(dtype).itemsize
        memory = ring.popleft()
        if len(memory) < needed:
            memory = np.empty(needed, dtype=np.uint8)
        ring.append(memory)
        return memory[:needed].view(dtype).reshape(shape)
