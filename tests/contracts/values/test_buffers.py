"""Memory that is used again: never while somebody still looks at it."""

import sys
from threading import Thread

import numpy as np
import pytest

from skyrl_engine.contracts.values.buffers import ReusableJoin
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import LONG


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def pieces(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def test_pieces_are_joined_end_to_end():
    join = ReusableJoin()
    assert bytes(join(pieces(b"ab", b"", b"cde"))) == b"abcde"
    assert bytes(join(pieces(b"z"))) == b"z", "nothing is left of a longer join before"
    assert bytes(join([])) == b""


def test_memory_is_written_again_once_nobody_looks_at_it():
    join = ReusableJoin()
    first = join(pieces(b"x" * 1000))
    place = address(first)
    del first
    assert address(join(pieces(b"y" * 900))) == place


def test_what_is_held_in_any_form_never_changes():
    join = ReusableJoin()
    view = join(pieces(b"a" * 8))
    array = np.frombuffer(join(pieces(b"b" * 8)), dtype=np.int32)
    part = array[1:]
    del array
    for _ in range(3):
        join(pieces(b"c" * 8))
    assert bytes(view) == b"a" * 8
    assert part.tobytes() == b"b" * 4


def test_no_more_memory_is_kept_than_was_asked_for():
    join = ReusableJoin(keep=2)
    held = [join(pieces(bytes([number]) * 64)) for number in range(5)]
    addresses = {address(view) for view in held[-2:]}
    assert [bytes(view) for view in held] == [bytes([number]) * 64 for number in range(5)]
    del held
    again = [join(pieces(b"z" * 64)) for _ in range(2)]
    assert {address(view) for view in again} == addresses
    with pytest.raises(ValueError, match="keep"):
        ReusableJoin(keep=0)


@pytest.mark.parametrize("length", [3, LONG + 1])
def test_samples_taken_into_it_are_the_same_and_stay(length):
    """Step after step, whether the steps before are still held or not."""
    ids = np.arange(8 * length).reshape(8, length)
    columns = SampleColumns.from_lists(input_ids=list(ids), columns={"rewards": list(ids.astype(np.float32))})
    join = ReusableJoin()
    steps = [np.random.default_rng(seed).permutation(8) for seed in range(4)]
    held = [columns.take(chosen, join) for chosen in steps]
    for chosen, own in zip(steps, held, strict=True):
        for name, ours, fresh in zip("iwr", _values(own), _values(columns.take(chosen)), strict=True):
            np.testing.assert_array_equal(ours, fresh, err_msg=name, strict=True)
        assert columns.take(chosen, join).input_ids.tolist() == ids[chosen].ravel().tolist()


def test_every_array_of_long_samples_is_taken_into_it():
    columns = SampleColumns.from_lists(input_ids=[[1] * (LONG + 1)], columns={"rewards": [[2.0] * (LONG + 1)]})
    buffers = []

    def join(parts: list[memoryview]) -> bytearray:
        buffers.append(bytearray().join(parts))
        return buffers[-1]

    taken = columns.take([0], join)
    assert {values.ctypes.data for values in _values(taken)} == {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}


def _values(columns: SampleColumns) -> list[np.ndarray]:
    return [columns.input_ids, columns.loss_weight, columns.columns["rewards"]]


def test_threads_that_share_one_get_their_own_bytes():
    join, wrong = ReusableJoin(), []

    def work(byte: int) -> None:
        parts = pieces(bytes([byte]) * 100_000)
        for _ in range(300):
            view = join(parts)
            if set(view[::9_999].tolist()) != {byte}:
                wrong.append(byte)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=work, args=(byte,)) for byte in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
