"""Memory that a loop builds its batches into again and again."""

import math
from collections import deque
from io import BytesIO
from threading import Lock

import numpy as np
from attrs import define, field
from attrs.validators import ge

from skyrl_engine.contracts.values.ragged import AnyArray


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


@define
class ReusableJoin:
    """Joins bytes in memory that it writes again only once nobody looks at it any more: nothing that is held ever changes.

    A loop that copies megabytes into fresh memory waits longer for the pages than for the copying. Up to `keep` pieces of memory are kept
    for good, each somewhat larger than the largest join it has held. Threads may share one; they wait for each other.
    """

    keep: int = field(default=8, validator=ge(1))
    _streams: deque[BytesIO] = field(init=False, repr=False)
    _lock: Lock = field(factory=Lock, init=False, repr=False)

    @_streams.default
    def _none_yet(self) -> deque[BytesIO]:
        return deque(maxlen=self.keep)

    def __call__(self, pieces: list[memoryview]) -> memoryview:
        """The pieces end to end; a `ragged.Join`."""
        with self._lock:
            stream = self._free()
            stream.seek(0)
            stream.writelines(pieces)
            return stream.getbuffer()[: stream.tell()]

    def _free(self) -> BytesIO:
        for stream in self._streams:
            try:
                stream.write(b"")
            except BufferError:  # its bytes are still looked at
                continue
            return stream
        self._streams.append(BytesIO())
        return self._streams[-1]
