"""Memory that a loop joins bytes into again and again."""

from collections import deque
from io import BytesIO
from threading import Lock

from attrs import define, field
from attrs.validators import ge


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
