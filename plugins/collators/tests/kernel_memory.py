"""Memory lent to compiled kernels, and what is asked of their answers; for the checks that `check_kernels.py` runs."""

import struct

SIZE = {"q": 8, "i": 4, "f": 4, "B": 1, "d": 8}
HUGE = 2**63 - 1
SPECIAL = (0x7FC00001, 0xFF800123, 0x80000000, 0x00000001, 0x7F800000)
"""Bits of float32 that a copy by value might change: NaN with a payload, a signalling NaN, -0.0, a denormal; and infinity."""


class Memory:
    """Arrays lent to one call."""

    def __init__(self) -> None:
        self.lent = []

    def array(self, kind, values, *, shift=0):
        """The values in memory of exactly this size; `shift` bytes in front of them make its address odd."""
        return self.bits(kind, struct.pack(f"{len(values)}{kind}", *values), shift=shift)

    def bits(self, kind, content, *, shift=0):
        block = bytearray(shift) + content
        view = memoryview(block)[shift:].cast(kind)
        self.lent.append((block, view))
        return view

    def require_returned(self, label):
        """All arrays must have been given back."""
        for block, view in self.lent:
            try:
                view.release()
                block.append(0)
            except BufferError as problem:
                raise AssertionError(f"{label}: memory was not given back ({problem})") from problem
        self.lent.clear()


def require_equal(label, got, expected):
    assert got == expected, f"{label}: {got!r} where {expected!r} is due"


def require_refusal(label, kind, words, call, *arguments):
    problem = result = None
    try:
        result = call(*arguments)
    except (TypeError, ValueError, OverflowError, SystemError) as caught:
        problem = caught.with_traceback(None)  # which would keep the arguments alive
    assert problem is not None, f"{label}: accepted, result {result!r}"
    assert type(problem) is kind, f"{label}: {problem!r} where {kind.__name__} is due"
    assert words in str(problem), f"{label}: {problem} does not say {words!r}"
