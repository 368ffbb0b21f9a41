"""The compiled kernels by themselves: what they write, what they refuse, and how one of the two engines is chosen."""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import SampleColumns, collate
from skyrl_engine_collators import kernels as choice
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator

PROJECT = Path(__file__).parent.parent
GUARD = 3
"""Elements on either side of an output that must stay as they are."""


@pytest.fixture(scope="module")
def module():
    try:
        return choice.load()
    except ImportError as problem:
        pytest.skip(f"no compiled kernels ({problem}); install plugins/collators where there is a C compiler")


@pytest.fixture(scope="module")
def compiled(module):
    return choice.Kernels(module)


def indices(*values):
    return np.array(values, dtype=np.int64)


@st.composite
def pieces(draw):
    """Total, available, and pieces of [0, available) that have their places, in order, in [0, total)."""
    available = draw(st.integers(0, 12))
    starts, lengths, places, end = [], [], [], 0
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, available))
        places.append(end + draw(st.integers(0, 3)))
        starts.append(start)
        lengths.append(draw(st.integers(0, available - start)))
        end = places[-1] + lengths[-1]
    return end + draw(st.integers(0, 3)), available, indices(*starts), indices(*lengths), indices(*places)


def bits(draw, count, dtype):
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size))), dtype=dtype)


@given(st.data())
def test_every_kind_of_field_equals_the_plain_loop_and_nothing_else_is_written(compiled, data):
    """Any bits at all: NaN with payloads, -0.0, denormals. Sources begin at odd addresses, as Arrow's may."""
    total, available, starts, lengths, places = data.draw(pieces())
    pad = data.draw(st.integers(-(2**63), 2**63 - 1))
    kinds = [("int64", "int64", pad), ("int64", "int32", 0), ("int64", "ones", 0), ("int64", "counted", pad)]
    kinds += [("float32", "float32", 0), ("float32", "uint8", 0)]
    fields, expected, memories = [], [], []
    for dtype, content, fill in data.draw(st.lists(st.sampled_from(kinds), min_size=1)):
        memory = np.full(total + 2 * GUARD, 77, dtype=dtype)
        if content in ("ones", "counted"):
            source = content
        else:
            odd = np.empty(1 + available * np.dtype(content).itemsize, dtype=np.uint8)[1:].view(content)
            odd[:] = bits(data.draw, available, content)
            source = odd
        wanted = memory.copy()
        wanted[GUARD : GUARD + total] = fill
        for start, length, place in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
            for i in range(length):
                value = {"ones": 1, "counted": i}.get(content) if isinstance(source, str) else source[start + i]
                wanted[GUARD + place + i] = value
        fields.append((memory[GUARD : GUARD + total], fill, source))
        memories.append(memory)
        expected.append(wanted)
    compiled.write_rows(fields, starts=starts, lengths=lengths, places=places)
    for memory, wanted in zip(memories, expected, strict=True):
        assert memory.tobytes() == wanted.tobytes()


def base():
    """Arguments that fit: two pieces of six values in an output of ten."""
    return {
        "out": np.full(10, 7, dtype=np.int64),
        "fill": 0,
        "source": np.arange(6, dtype=np.int64),
        "starts": indices(0, 3),
        "lengths": indices(3, 3),
        "places": indices(1, 5),
    }


READ_ONLY = np.zeros(10, dtype=np.int64)
READ_ONLY.flags.writeable = False
HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"places": indices(1, 8)}, "reaches beyond the 10 of the output"),
        ({"places": indices(1, 11)}, "reaches beyond the 10 of the output"),
        ({"places": indices(1, HUGE)}, "reaches beyond the 10 of the output"),
        ({"places": indices(1, 3)}, "begins before the one in front of it ends"),
        ({"places": indices(5, 1)}, "begins before the one in front of it ends"),
        ({"places": indices(-1, 5)}, "negative"),
        ({"starts": indices(0, 4)}, "reaches beyond the 6 of its source"),
        ({"starts": indices(0, 7), "lengths": indices(3, 0)}, "reaches beyond the 6 of its source"),
        ({"starts": indices(0, HUGE)}, "reaches beyond the 6 of its source"),
        ({"starts": indices(-1, 3)}, "negative"),
        ({"lengths": indices(3, HUGE)}, "reaches beyond"),
        ({"lengths": indices(3, -1)}, "negative"),
        ({"lengths": indices(3)}, "lengths has 1 entries, not 2"),
        ({"places": indices(1, 5, 9)}, "places has 3 entries, not 2"),
        ({"starts": np.array([0, 3], dtype=np.int32)}, "starts is int32, not int64"),
        ({"starts": np.array([0.0, 3.0])}, "starts is neither"),
        ({"starts": indices(0, 0, 3, 3)[::2]}, "starts is no C-contiguous array"),
        ({"out": READ_ONLY}, "no C-contiguous and writable array"),
        ({"out": np.zeros(20, dtype=np.int64)[::2]}, "no C-contiguous and writable array"),
        ({"out": np.zeros(81, dtype=np.uint8)[1:].view(np.int64)}, "not aligned"),
        ({"out": np.zeros(10, dtype=np.int32)}, "neither int64 nor float32"),
        ({"out": np.zeros(10, dtype=">i8")}, "neither int64"),
        ({"out": np.zeros(10, dtype=np.float32)}, "float32 outputs take float32 or uint8"),
        ({"out": np.zeros(10, dtype=np.float32), "source": "ones"}, "ones and counts are int64"),
        ({"out": np.zeros(10, dtype=np.float32), "source": np.zeros(6, dtype=np.uint8), "fill": 1}, "filled with 0"),
        ({"source": np.zeros(6, dtype=np.float64)}, "neither int64, int32"),
        ({"source": np.zeros(6, dtype=np.float32)}, "int64 outputs take"),
        ({"source": np.zeros(6, dtype=np.uint8)}, "int64 outputs take"),
        ({"source": np.zeros(12, dtype=np.int64)[::2]}, "a source is no C-contiguous array"),
        ({"source": "twos"}, "'ones' or 'counted'"),
        ({"source": None}, "a source is no C-contiguous array"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(compiled, change, complaint):
    arguments = {**base(), **change}
    out, before = arguments["out"], np.asarray(arguments["out"]).copy()
    first = np.full(len(out), 7, dtype=np.int64)
    with pytest.raises(DataError, match=complaint):
        compiled.write_rows(
            [(first, 0, "ones"), (out, arguments["fill"], arguments["source"])],
            **{name: arguments[name] for name in ("starts", "lengths", "places")},
        )
    assert (first == 7).all()
    assert np.array_equal(out, before)


def test_outputs_of_other_lengths_and_shared_memory_are_refused(compiled):
    memory = np.zeros(20, dtype=np.int64)
    where = {"starts": indices(0), "lengths": indices(2), "places": indices(0)}
    for fields, complaint in (
        ([(memory[:10], 0, "ones"), (memory[10:19], 0, "ones")], "output 1 has 9 elements"),
        ([(memory[:10], 0, "ones"), (memory[9:19], 0, "ones")], "shares memory"),
        ([(memory[:10], 0, memory[9:])], "shares memory"),
    ):
        with pytest.raises(DataError, match=complaint):
            compiled.write_rows(fields, **where)
    compiled.write_rows([(memory[:10], 0, "ones"), (memory[10:], 0, "counted")], **where)
    assert memory.tolist() == [1, 1, *[0] * 9, 1, *[0] * 8]
    compiled.write_rows([], **where)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"scored": indices(2, 3)}, "sample 1 scores 3 of 2"),
        ({"scored": indices(-1, 2)}, "sample 0 scores -1"),
        ({"scored": indices(2, 1)}, "actions has 4 entries, not 3"),
        ({"actions": indices(3, 2), "scored": indices(3, 2)}, "sample 1 scores more tokens than the 4 entries hold"),
        ({"sample_rows": indices(0)}, "action_counts has 2 entries, not 1"),
        ({"out": (indices(*range(4)), indices(*range(4)), indices(*range(5)))}, "columns has 5 entries, not 4"),
        ({"out": (indices(*range(4)), indices(*range(4)), np.zeros(4, dtype=np.int32))}, "columns is int32, not int64"),
        ({"out": (READ_ONLY[:4], indices(*range(4)), indices(*range(4)))}, "actions is no C-contiguous and writable array"),
        ({"out": (READ_ONLY.copy()[:4],) * 3}, "share memory"),
    ],
)
def test_a_gather_index_that_does_not_fit_is_refused(compiled, change, complaint):
    fitting = {"sample_rows": indices(0, 1), "actions": indices(2, 2), "scored": indices(2, 2), "first_columns": indices(0, 0)}
    arguments = {"out": tuple(np.full(4, 7, dtype=np.int64) for _ in range(3)), **fitting, **change}
    before = [array.copy() for array in arguments["out"]]
    with pytest.raises(DataError, match=complaint):
        compiled.write_gather(**arguments)
    assert all(np.array_equal(array, copy) for array, copy in zip(arguments["out"], before, strict=True))


NUMBERS = st.integers(-(2**70), 2**70) | st.integers(0, 1) | st.floats(width=64) | st.booleans()


@given(st.lists(st.lists(NUMBERS)) | st.lists(st.lists(st.integers(0, 1) | st.sampled_from((0.0, 1.0)), max_size=80)))
def test_lists_are_read_as_plain_conversion_does_or_not_at_all(module, rows):
    """The one that gives up is never wrong: what Python says of the numbers decides what must have been read."""
    flat = [number for row in rows for number in row]
    whole = all(isinstance(number, int) for number in flat)
    fits = {
        "int64": whole and all(-(2**63) <= number < 2**63 for number in flat),
        "int32": whole and all(-(2**31) <= number < 2**31 for number in flat),
        "uint8": all(number in (0, 1) and not np.signbit(number) for number in flat),
        "float32": True,
    }
    lengths = np.full(len(rows), 77, dtype=np.int64)
    assert module.measure_lists(rows, lengths)
    assert lengths.tolist() == [len(row) for row in rows]
    for dtype, expected in fits.items():
        memory = np.full(len(flat) + 2 * GUARD, 77, dtype=dtype)
        out = memory[GUARD : GUARD + len(flat)]
        assert module.read_lists(rows, lengths, out) == expected
        assert (memory[:GUARD] == 77).all()
        assert (memory[GUARD + len(flat) :] == 77).all()
        if expected:
            with np.errstate(over="ignore"):
                wanted = np.array([float(number) for number in flat]).astype(dtype) if dtype == "float32" else np.array(flat, dtype)
            assert out.tobytes() == wanted.tobytes()


class Seven(int):
    """A number that decides itself what it is worth."""

    def __float__(self):
        return 7.0


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([[1, 2]], indices(1)),
        ([[1]], indices(2)),
        ([[1, 2], [3]], indices(1, 2)),
        ([[1, 2], [3]], indices(2, 2)),
        ([[1, 2], (3,)], indices(2, 1)),
        ([[1, 2], [None]], indices(2, 1)),
        ([[1, 2], ["3"]], indices(2, 1)),
        ([[1, 2], [Seven()]], indices(2, 1)),
        ([[1, 2], [np.float64(3)]], indices(2, 1)),
        ([[10**400, 2], [3]], indices(2, 1)),
    ],
)
def test_rows_that_are_no_plain_lists_of_the_length_are_left_to_python(module, rows, lengths):
    out = np.zeros(3, dtype=np.float32)
    assert module.read_lists(rows, lengths, out) is False
    assert module.read_lists([[1, 2], [3]], indices(2, 1), out) is True


def test_memory_of_another_size_is_not_read_into(module):
    for size in (0, 2, 4):
        assert module.read_lists([[1, 2], [3]], indices(2, 1), np.zeros(size, dtype=np.int64)) is False
    with pytest.raises(ValueError, match="lengths has 1 entries, not 2"):
        module.read_lists([[1], [2]], indices(2), np.zeros(2, dtype=np.int64))
    with pytest.raises(ValueError, match="lengths has 1 entries, not 2"):
        module.measure_lists([[1], [2]], indices(2))


def test_the_reader_returns_values_and_lengths_or_nothing(compiled):
    values, lengths = compiled.read_lists([[1, 2], [], [3]], np.int32)
    assert (values.dtype, values.tolist(), lengths.tolist()) == (np.int32, [1, 2, 3], [2, 0, 1])
    for rows in ([[1, 2], (3,)], [[1, 2], [0.5]], [[1], None]):
        assert compiled.read_lists(rows, np.int32) is None


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
def test_columns_whose_offsets_leave_their_values_are_an_error_of_the_data(compiled, monkeypatch, collator):
    """Only who bypasses `create` can have such columns; the kernel does not trust them."""
    monkeypatch.setenv(choice.VARIABLE, "native")
    columns = SampleColumns.from_lists(input_ids=[[1, 2, 3], [4, 5]], columns={"rewards": [[0.0] * 3, [1.0] * 2]})
    for broken in (
        evolve(columns, input_ids=columns.input_ids[:-1]),
        evolve(columns, columns={"rewards": columns.columns["rewards"][:-1]}),
        evolve(columns, loss_weight=columns.loss_weight.astype(np.float64)),
    ):
        with pytest.raises(DataError, match=r"nothing was written: (?!None)"):
            collate(collator, broken)


def test_ranks_that_cannot_take_all_items_are_an_error_of_the_data(compiled):
    with pytest.raises(DataError, match=r"nothing was written: (?!None)"):
        compiled.balance(indices(1, 2, 3), 2, 1)


@pytest.fixture
def no_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_engine_collators._kernels", None)  # an import of it fails
    choice._kernels_for.cache_clear()
    yield
    choice._kernels_for.cache_clear()


def test_without_compiled_kernels_one_line_says_so_and_numpy_does_the_work(no_module, monkeypatch, caplog):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            batch = collate(PaddedCollator(), SampleColumns.from_lists(input_ids=[[1, 2], [3]]))
    assert batch["input_ids"].tolist() == [[1, 2], [0, 3]]
    (record,) = caplog.records
    assert "NumPy" in record.message


def test_forcing_absent_kernels_is_an_error_with_a_remedy(no_module, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "native")
    with pytest.raises(UnsupportedError, match="Reinstall skyrl-engine-collators where there is a C compiler"):
        collate(PaddedCollator(), SampleColumns.from_lists(input_ids=[[1]]))


def test_kernels_of_another_interface_count_as_absent(no_module, monkeypatch):
    other = type(sys)("skyrl_engine_collators._kernels")
    other.INTERFACE = choice.INTERFACE + 1
    monkeypatch.setitem(sys.modules, "skyrl_engine_collators._kernels", other)
    monkeypatch.setenv(choice.VARIABLE, "native")
    with pytest.raises(UnsupportedError, match=f"interface {choice.INTERFACE + 1}, this version needs {choice.INTERFACE}"):
        choice.kernels()


def test_the_variable_chooses_the_engine(compiled, monkeypatch):
    for setting, expected in (("numpy", False), ("native", True), ("", True)):
        monkeypatch.setenv(choice.VARIABLE, setting)
        assert (choice.kernels() is not None) == expected
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(UnsupportedError, match=r"is 'cuda'\. Set SKYRL_ENGINE_KERNELS to native or numpy"):
        choice.kernels()


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("collators_hatch_build", PROJECT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("compiler", ["false", "a-compiler-that-is-not-there"])
def test_a_build_without_a_working_compiler_says_why_and_leaves_nothing(build, monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(build.CompilerError, match=compiler):
        build.compile_kernels(tmp_path / build.NAME)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "platform", "flags", "tag"),
    [
        ("darwin", "macosx-11.0-arm64", "-arch arm64", "macosx_11_0_arm64"),
        ("darwin", "macosx-10.9-universal2", "-arch x86_64", "macosx_10_9_x86_64"),
        ("darwin", "macosx-10.9-universal2", "-arch x86_64 -arch arm64", "macosx_10_9_universal2"),
        ("darwin", "macosx-10.9-universal2", "", "macosx_10_9_arm64"),
        ("linux", "linux-aarch64", "", "linux_aarch64"),
    ],
)
def test_a_wheel_is_tagged_with_the_architecture_that_was_compiled(build, monkeypatch, host, platform, flags, tag):
    """MacOS' Python may be of two architectures; a wheel that says so, and holds one, would be installed where it cannot run."""
    monkeypatch.setattr(build.sys, "platform", host)
    monkeypatch.setattr(build.sysconfig, "get_platform", lambda: platform)
    monkeypatch.setattr(build, "machine", lambda: "arm64")
    monkeypatch.setenv("ARCHFLAGS", flags)
    assert build._name_platform() == tag


def test_the_sources_compile_without_a_warning(build, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler on this machine")
    build.compile_kernels(tmp_path / build.NAME, ["-Werror", "-Wshadow", "-Wstrict-prototypes"])
    assert [path.name for path in tmp_path.iterdir()] == [build.NAME]


@pytest.mark.proof
def test_random_arguments_under_address_and_undefined_behaviour_sanitizers(build, tmp_path):
    """Arguments that fit and arguments that do not, on memory of exactly the stated size: no byte outside is ever touched."""
    compiler = shutil.which("gcc")
    library = (
        compiler and subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    )
    if not library or not Path(library.strip()).is_absolute():
        pytest.skip("no gcc with libasan on this machine")
    module = tmp_path / build.NAME
    build.compile_kernels(module, ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"])
    options = {"LD_PRELOAD": library.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    script = [sys.executable, str(PROJECT / "tests" / "fuzz_kernels.py"), str(module)]
    process = subprocess.run([*script, "20000"], env={**os.environ, **options}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    assert "refused" in process.stdout
    overrun = subprocess.run([*script, "overrun"], env={**os.environ, **options}, capture_output=True, text=True, check=False)
    assert "AddressSanitizer" in overrun.stderr, "the sanitizer does not see an overrun that is there"
