"""An object on its way through Ray's store, as few buffers as its size allows and none so large that Ray starts threads to copy it."""

import pickle
from typing import Any, Self

from attrs import frozen

PIECE_BYTES = 15 << 16
"""Just below 1 MiB, from which on Ray starts six threads to copy a buffer: half a millisecond of CPU time, as much as copying 5 MB."""

MOST_PIECES = 32
"""A buffer of more pieces is left whole: copying it takes long enough for threads to be worth their start."""

IN_BODY = 16 << 10
"""Bytes up to which a buffer is copied into the body, which costs less than an entry of its own in Ray's store."""


@frozen(eq=False)
class Parcel:
    """`body` is the pickled object, each of `buffers` one of its large arrays, in pieces."""

    body: bytes
    buffers: list[list[pickle.PickleBuffer]]

    @classmethod
    def of(cls, content: Any) -> Self:
        """Nothing large is copied: the pieces view the object's own memory. Pickled as Ray would, with classes of the main program too."""
        from ray import cloudpickle

        buffers: list[list[pickle.PickleBuffer]] = []

        def in_body(buffer: pickle.PickleBuffer) -> bool:
            memory = buffer.raw()
            if memory.nbytes <= IN_BODY:
                return True
            step = PIECE_BYTES if memory.nbytes <= MOST_PIECES * PIECE_BYTES else memory.nbytes
            buffers.append([pickle.PickleBuffer(memory[start : start + step]) for start in range(0, memory.nbytes, step)])
            return False

        return cls(cloudpickle.dumps(content, protocol=5, buffer_callback=in_body), buffers)

    def unpack(self) -> Any:
        """The object; its large arrays are read-only, and those of one piece are not copied."""
        return pickle.loads(self.body, buffers=[_join_pieces(pieces) for pieces in self.buffers])  # noqa: S301 - its own controller sent it


def _join_pieces(pieces: list[pickle.PickleBuffer]) -> pickle.PickleBuffer | bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
