"""Ray's store gets few buffers, none that Ray starts threads for without need, and gives the same bytes at the other end."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from skyrl_engine.workers.parcel import IN_BODY, MOST_PIECES, PIECE_BYTES, Parcel

RAY_STARTS_THREADS_AT = 1 << 20


def send(parcel):
    """As Ray sends it: every buffer out of band, and read-only at the other end."""
    buffers = []
    body = pickle.dumps(parcel, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(body, buffers=[bytes(buffer.raw()) for buffer in buffers]), [buffer.raw().nbytes for buffer in buffers]


@pytest.mark.parametrize(
    "size",
    [0, 1, IN_BODY, IN_BODY + 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, MOST_PIECES * PIECE_BYTES],
)
def test_every_size_arrives_whole_in_pieces_that_start_no_thread(size):
    values = np.arange(size, dtype=np.uint8)
    arrived, sizes = send(Parcel.of({"values": values, "number": 3}))
    opened = arrived.unpack()
    assert opened["number"] == 3
    np.testing.assert_array_equal(opened["values"], values, strict=True)
    assert sum(sizes) == (size if size > IN_BODY else 0)
    assert all(length < RAY_STARTS_THREADS_AT for length in sizes)
    assert len(sizes) == (-(-size // PIECE_BYTES) if size > IN_BODY else 0)


def test_what_takes_long_to_copy_stays_whole_for_threads():
    values = np.zeros(MOST_PIECES * PIECE_BYTES + 1, dtype=np.uint8)
    values[-1] = 7
    arrived, sizes = send(Parcel.of(values))
    assert sizes == [len(values)]
    assert arrived.unpack().tobytes() == values.tobytes()


def test_arrays_of_every_shape_type_and_order():
    content = [
        np.arange(70_000, dtype=np.float32).reshape(7, 10_000),
        np.asfortranarray(np.arange(600_000, dtype=np.int64).reshape(2, 300_000)),
        np.arange(40_000, dtype=np.int32)[::2],
        np.zeros((0, 4)),
        np.array([np.nan, -0.0]),
    ]
    arrived, _ = send(Parcel.of(content))
    for here, there in zip(content, arrived.unpack(), strict=True):
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        assert here.tobytes() == there.tobytes()


def test_large_arrays_are_viewed_and_small_ones_cost_no_buffer():
    large, small = np.zeros(3 * PIECE_BYTES, dtype=np.uint8), np.zeros(10)
    parcel = Parcel.of((large, small))
    (pieces,) = parcel.buffers
    large[-1] = 1
    assert memoryview(pieces[-1])[-1] == 1


def test_large_arrays_arrive_read_only_whether_they_travelled_in_pieces_or_not():
    for size in (IN_BODY + 1, 3 * PIECE_BYTES):
        arrived, _ = send(Parcel.of(np.zeros(size, dtype=np.uint8)))
        assert not arrived.unpack().flags.writeable


def test_a_class_of_the_main_program_arrives(tmp_path):
    """Its module is not importable at the other end, so it travels by value."""
    program = tmp_path / "main.py"
    program.write_text(
        "import pickle, sys\n"
        "from skyrl_engine.workers.parcel import Parcel\n"
        "class Mine:\n"
        "    number = 3\n"
        "sys.stdout.buffer.write(pickle.dumps(Parcel.of(Mine()), protocol=5))\n"
    )
    written = subprocess.run([sys.executable, str(program)], capture_output=True, check=True, timeout=120).stdout
    assert pickle.loads(written).unpack().number == 3
