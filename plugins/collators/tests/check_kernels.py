"""What a compiled kernel module owes, checked in a process of its own: `check_kernels.py MODULE`.

Prints the first thing that is wrong and ends with 1. Everything is compared with plain loops over Python numbers. Memory is bytearrays of
exactly the size that is needed, so that a sanitizer sees each overrun; a bytearray cannot grow while it is borrowed, which shows whether it
was given back. Without NumPy, because this process starts once for every mutant of the kernels.
"""

import ctypes
import random
import struct
import sys
import tracemalloc
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

SIZE = {"q": 8, "i": 4, "f": 4, "B": 1, "d": 8}
HUGE = 2**63 - 1
SPECIAL = (0x7FC00001, 0xFF800123, 0x80000000, 0x00000001, 0x7F800000)
"""Bits of float32 that a copy by value might change: NaN with a payload, a signalling NaN, -0.0, a denormal; and infinity."""


def main() -> None:
    loader = ExtensionFileLoader("_kernels", sys.argv[1])
    module = module_from_spec(spec_from_loader("_kernels", loader))
    loader.exec_module(module)
    assert int(sys.argv[2]) == module.INTERFACE, f"interface {module.INTERFACE}"
    for check in (
        rows_equal_the_loop,
        rows_are_refused,
        gathers_equal_the_loop,
        gathers_are_refused,
        lists_equal_python,
        bins_equal_the_scan,
        bins_are_refused,
        nothing_leaks,
    ):
        check(module)
        print(f"{check.__name__}: as it should be", flush=True)


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

    def returned(self, what):
        """All arrays must have been given back."""
        for block, view in self.lent:
            try:
                view.release()
                block.append(0)
            except BufferError as problem:
                raise AssertionError(f"{what}: memory was not given back ({problem})") from problem
        self.lent.clear()


def equal(what, got, expected):
    assert got == expected, f"{what}: {got!r} where {expected!r} is due"


def refused(what, kind, words, call, *arguments):
    problem = result = None
    try:
        result = call(*arguments)
    except (TypeError, ValueError, OverflowError, SystemError) as caught:
        problem = caught.with_traceback(None)  # which would keep the arguments alive
    assert problem is not None, f"{what}: accepted, result {result!r}"
    assert type(problem) is kind, f"{what}: {problem!r} where {kind.__name__} is due"
    assert words in str(problem), f"{what}: {problem} does not say {words!r}"


FIELDS = (("q", "q"), ("q", "i"), ("q", "ones"), ("q", "counted"), ("f", "f"), ("f", "B"))


def random_values(generator, kind, count):
    match kind:
        case "f":
            return b"".join(struct.pack("I", generator.choice((*SPECIAL, generator.getrandbits(32)))) for _ in range(count))
        case "q":
            return struct.pack(f"{count}q", *(generator.choice((-1, 0, 2**40, -(2**63), HUGE)) for _ in range(count)))
        case "i":
            return struct.pack(f"{count}i", *(generator.choice((-1, 0, 151_643, -(2**31), 2**31 - 1)) for _ in range(count)))
    return bytes(generator.randrange(256) for _ in range(count))


def rows_equal_the_loop(module):
    generator = random.Random(0)
    for number in range(120):
        available, starts, lengths, places, end = generator.randint(0, 12), [], [], [], 0
        for _ in range(generator.randint(0, 5)):
            starts.append(generator.randint(0, available))
            lengths.append(generator.choice((0, available - starts[-1], generator.randint(0, available - starts[-1]))))
            places.append(end + generator.choice((0, 0, 3)))
            end = places[-1] + lengths[-1]
        total = end + generator.choice((0, 0, 4))
        memory, fields, expected = Memory(), [], []
        for kind, content in generator.sample(FIELDS, generator.randint(1, len(FIELDS))):
            fill = generator.choice((0, 151_643, -1, HUGE)) if kind == "q" else 0
            out = memory.bits(kind, b"\x4d" * (total * SIZE[kind]))
            bits = random_values(generator, content, available) if content in SIZE else b""
            source = memory.bits(content, bits, shift=generator.choice((0, 1))) if content in SIZE else content
            wanted = [struct.pack(kind, fill)] * total
            for start, length, place in zip(starts, lengths, places, strict=True):
                for i in range(length):
                    value = 1 if content == "ones" else i if content == "counted" else None
                    if content == kind:
                        piece = bits[(start + i) * SIZE[kind] : (start + i + 1) * SIZE[kind]]
                        wanted[place + i] = piece
                        continue
                    if value is None:
                        (value,) = struct.unpack_from(content, bits, (start + i) * SIZE[content])
                    wanted[place + i] = struct.pack(kind, value)
            fields.append((out, fill, source))
            expected.append((content, b"".join(wanted)))
        module.write_rows(tuple(fields), *(memory.array("q", values, shift=number % 2) for values in (starts, lengths, places)))
        for (out, _, _), (content, wanted) in zip(fields, expected, strict=True):
            equal(f"rows {number} from {content}", out.tobytes(), wanted)
        del out, source, fields
        memory.returned(f"rows {number}")


def rows_are_refused(module):
    """One change each to arguments that fit: two pieces of six values in an output of ten."""
    memory = Memory()
    read_only, strided = memoryview(bytes(80)).cast("q"), memory.array("q", range(20))[::2]
    shared, numbers = memory.array("q", [7] * 20), memory.array("f", [7] * 6)
    big_endian = memoryview((ctypes.c_int64.__ctype_be__ * 10)())
    cases = [
        ("a piece one beyond the output", ValueError, "beyond the 10 of the output", {"places": [1, 8]}),
        ("an empty piece beyond the output", ValueError, "beyond the 10 of the output", {"places": [1, 11], "lengths": [3, 0]}),
        ("a place that overflows", ValueError, "beyond the 10 of the output", {"places": [1, HUGE]}),
        ("a piece on the one before", ValueError, "begins before", {"places": [1, 3]}),
        ("a negative place", ValueError, "negative", {"places": [-1, 5]}),
        ("a piece one beyond the source", ValueError, "beyond the 6 of its source", {"starts": [0, 4]}),
        ("an empty piece beyond the source", ValueError, "beyond the 6 of its source", {"starts": [0, 7], "lengths": [3, 0]}),
        ("a start that overflows", ValueError, "beyond the 6 of its source", {"starts": [0, HUGE]}),
        ("a negative start", ValueError, "negative", {"starts": [-1, 3]}),
        ("a negative length", ValueError, "negative", {"lengths": [3, -1]}),
        ("a length that overflows", ValueError, "beyond", {"lengths": [3, HUGE]}),
        ("too few lengths", ValueError, "lengths has 1 entries, not 2", {"lengths": [3]}),
        ("too many places", ValueError, "places has 3 entries, not 2", {"places": [1, 5, 9]}),
        ("starts of int32", TypeError, "starts is int32, not int64", {"starts": memory.array("i", [0, 3])}),
        ("starts of float64", TypeError, "starts is neither", {"starts": memory.array("d", [0, 3])}),
        ("strided starts", ValueError, "starts is no C-contiguous array", {"starts": strided[:2]}),
        ("starts that are no array", ValueError, "starts is no C-contiguous array", {"starts": 7}),
        ("read-only memory", ValueError, "no C-contiguous and writable array", {"out": read_only}),
        ("strided memory", ValueError, "no C-contiguous and writable array", {"out": strided}),
        ("unaligned memory", ValueError, "not aligned", {"out": memory.array("q", [7] * 10, shift=1)}),
        ("an int32 output", TypeError, "neither int64 nor float32", {"out": memory.array("i", [7] * 10)}),
        ("a byte output", TypeError, "neither int64 nor float32", {"out": memory.array("B", [7] * 10)}),
        ("a float64 output", TypeError, "neither int64, int32", {"out": memory.array("d", [7] * 10)}),
        ("the other byte order", TypeError, "neither int64, int32", {"out": big_endian}),
        ("a shorter output", ValueError, "output 1 has 9 elements, the ones before it 10", {"out": memory.array("q", [7] * 9)}),
        ("int64 into float32", TypeError, "int64 outputs take", {"out": memory.array("f", [7] * 10)}),
        ("float32 into int64", TypeError, "int64 outputs take", {"source": memory.array("f", [7] * 6)}),
        ("bytes into int64", TypeError, "int64 outputs take", {"source": memory.array("B", [7] * 6)}),
        ("ones as float32", TypeError, "ones and counts are int64", {"out": memory.array("f", [7] * 10), "source": "ones"}),
        ("a fill of float32", ValueError, "filled with 0", {"out": memory.array("f", [7] * 10), "source": numbers, "fill": 1}),
        ("a fill beyond int64", OverflowError, "", {"fill": 2**63}),
        ("another word", ValueError, "'ones' or 'counted'", {"source": "twos"}),
        ("a strided source", ValueError, "a source is no C-contiguous array", {"source": strided}),
        ("a source that overlaps the output", ValueError, "shares memory", {"out": shared[:10], "source": shared[9:]}),
        ("a source over which the output begins", ValueError, "shares memory", {"out": shared[10:], "source": shared[5:11]}),
        ("a source inside the output", ValueError, "shares memory", {"out": shared[:10], "source": shared[2:8]}),
        ("a shorter source than the first", ValueError, "beyond the 5 of its source", {"source": memory.array("q", [7] * 5)}),
    ]  # fmt: skip
    for what, kind, words, change in cases:
        base = {"out": [7] * 10, "fill": 0, "source": range(6), "starts": [0, 3], "lengths": [3, 3], "places": [1, 5]}
        arguments = {
            name: memory.array("q", value) if isinstance(value, list | range) else value
            for name, value in {**base, **change}.items()
        }
        first, longest = memory.array("q", [7] * 10), memory.array("q", range(6))
        out = arguments["out"]
        before = out.tobytes()
        fields = ((first, 0, longest), (out, arguments["fill"], arguments["source"]))
        refused(what, kind, words, module.write_rows, fields, *(arguments[name] for name in ("starts", "lengths", "places")))
        equal(what, (first.tolist(), out.tobytes()), ([7] * 10, before))
        del fields, out, arguments, change
    outputs = memory.array("q", [7] * 20)
    where = [memory.array("q", [0]) for _ in range(3)]
    overlapping = ((outputs[:10], 0, "ones"), (outputs[9:19], 0, "ones"))
    refused("outputs that share an element", ValueError, "shares memory", module.write_rows, overlapping, *where)
    refused("fields in a list", TypeError, "tuple", module.write_rows, [(outputs, 0, "ones")], *where)
    refused("a field of two", TypeError, "a field is", module.write_rows, ((outputs, 0),), *where)
    module.write_rows(((outputs[:10], 3, "ones"), (outputs[10:], 4, "ones")), *where)
    equal("outputs side by side", outputs.tolist(), [3] * 10 + [4] * 10)
    equal("no field at all", module.write_rows((), *where), None)
    del cases, strided, shared, numbers, overlapping
    memory.returned("refused rows")


def gathers_equal_the_loop(module):
    generator = random.Random(1)
    for number in range(80):
        samples = generator.randint(0, 5)
        rows, columns = ([generator.randint(0, 99) for _ in range(samples)] for _ in range(2))
        counts = [generator.choice((0, 1, 2, 7)) for _ in range(samples)]
        scored = [max(0, count - generator.randint(0, 1)) for count in counts]
        expected, before = [], 0
        for row, count, last, column in zip(rows, counts, scored, columns, strict=True):
            expected += [(before + count - last + k, row, column + k) for k in range(last)]
            before += count
        memory = Memory()
        outputs = [memory.array("q", [-7] * len(expected)) for _ in range(3)]
        module.write_gather(*outputs, *(memory.array("q", values) for values in (rows, counts, scored, columns)))
        equal(f"gather {number}", list(zip(*(out.tolist() for out in outputs), strict=True)), expected)
        del outputs
        memory.returned(f"gather {number}")


def gathers_are_refused(module):
    memory = Memory()
    read_only = memoryview(bytes(32)).cast("q")
    cases = [
        ("more scored than there are", ValueError, "sample 1 scores 3 of 2", {"scored": [2, 3]}),
        ("a negative count", ValueError, "sample 0 scores -1 of 2", {"scored": [-1, 2]}),
        ("entries left over", ValueError, "actions has 4 entries, not 3", {"scored": [2, 1]}),
        (
            "too few entries",
            ValueError,
            "sample 1 scores more tokens than the 4 entries hold",
            {"counts": [3, 2], "scored": [3, 2]},
        ),
        ("a sum that overflows", ValueError, "sample 1 scores more tokens", {"counts": [2, HUGE], "scored": [2, HUGE]}),
        ("too few rows", ValueError, "action_counts has 2 entries, not 1", {"sample_rows": [0]}),
        ("one entry more for columns", ValueError, "columns has 5 entries, not 4", {"columns": [-7] * 5}),
        ("one entry fewer for rows", ValueError, "rows has 3 entries, not 4", {"rows": [-7] * 3}),
        ("columns of int32", TypeError, "columns is int32, not int64", {"columns": memory.array("i", [-7] * 4)}),
        ("read-only memory", ValueError, "actions is no C-contiguous and writable array", {"actions": read_only}),
    ]
    outputs, inputs = ("actions", "rows", "columns"), ("sample_rows", "counts", "scored", "first_columns")
    for what, kind, words, change in cases:
        base = {
            **dict.fromkeys(outputs, [-7] * 4),
            "sample_rows": [0, 1],
            "counts": [2, 2],
            "scored": [2, 2],
            "first_columns": [0, 0],
        }
        arguments = {
            name: memory.array("q", value) if isinstance(value, list) else value for name, value in {**base, **change}.items()
        }
        before = [arguments[name].tobytes() for name in outputs]
        refused(what, kind, words, module.write_gather, *(arguments[name] for name in (*outputs, *inputs)))
        equal(what, [arguments[name].tobytes() for name in outputs], before)
        del arguments, change
    block = memory.array("q", [-7] * 12)
    given = [memory.array("q", values) for values in ([0, 1], [2, 2], [2, 2], [0, 0])]
    for what, slices in (
        ("actions on rows", (block[0:4], block[3:7], block[8:12])),
        ("actions on columns", (block[0:4], block[8:12], block[3:7])),
        ("rows on columns", (block[8:12], block[0:4], block[3:7])),
    ):
        refused(what, ValueError, "share memory", module.write_gather, *slices, *given)
        equal(what, block.tolist(), [-7] * 12)
    module.write_gather(block[0:4], block[4:8], block[8:12], *given)
    equal("outputs side by side", block.tolist(), [0, 1, 2, 3, 0, 0, 1, 1, 0, 1, 0, 1])
    del slices, cases
    memory.returned("refused gathers")


class Whole(int):
    """No int itself."""


def lists_equal_python(module):
    """What Python says of the numbers decides what must have been read, or that nothing may be."""
    generator = random.Random(2)
    ordinary = [[generator.randrange(2) for _ in range(count)] for count in (0, 63, 0, 1, 64, 65, 130, 0)]
    batches = [
        [],
        [[]],
        [[], [5], []],
        ordinary,
        [[151_643 + number for number in range(600)], [], list(range(1, 700))],
        [[number / 8 for number in range(100)], [number / 3 for number in range(500)]],
        [[-1], [-(2**31), 2**31 - 1], [-1.0, -0.0, 0.5]],
        *([[1, 0], [number]] for number in (2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**400, -1)),
        *(
            [[1, 0], [number]]
            for number in (True, False, 1.0, 0.0, -0.0, 2, -1, 255, 256, 257, 0.5, float("nan"), float("inf"), 1e39)
        ),
        *([[1, 0], [number]] for number in (None, "1", Whole(1), 1j, [1])),
        [[1] * 64 + [None], [2]],
        [[1] * 600, [2**31]],
        [[1] * 600, [2**31], [1] * 600],
    ]
    for number, rows in enumerate(batches):
        flat = [value for row in rows for value in row]
        plain = all(type(value) in (int, float, bool) for value in flat)
        whole = plain and not any(type(value) is float for value in flat)
        fits = {
            "q": whole and all(-(2**63) <= value < 2**63 for value in flat),
            "i": whole and all(-(2**31) <= value < 2**31 for value in flat),
            "f": plain and all(abs(value) < 10**300 or type(value) is float for value in flat),
            "B": plain and all(value in (0, 1) and str(value) != "-0.0" for value in flat),
        }
        for kind, expected in fits.items():
            memory = Memory()
            out, measured = memory.array(kind, [0] * len(flat)), memory.array("q", [77] * len(rows))
            equal(f"lists of list {number}", module.measure_lists(rows, measured), True)
            equal(f"lengths of list {number}", list(measured), [len(row) for row in rows])
            items = [value for value in flat if type(value) in (int, float) and value not in range(-5, 257)]
            counts = [sys.getrefcount(value) for value in items]
            got = module.read_lists(rows, memory.array("q", [len(row) for row in rows]), out)
            equal(f"list {number} as {kind}", got, expected)
            equal(f"references to the numbers of list {number}", [sys.getrefcount(value) for value in items], counts)
            if expected:
                wanted = [ctypes.c_float(value).value for value in flat] if kind == "f" else list(map(int, flat))
                equal(f"numbers of list {number} as {kind}", out.tobytes(), struct.pack(f"{len(flat)}{kind}", *wanted))
            del out, measured
            memory.returned(f"list {number}")
    memory = Memory()
    out = memory.array("q", [0] * 3)
    for rows in ([[1], (2,), [3]], [[1], [2], None], [{}, [1], [2]]):
        equal(f"{rows} are lists", module.measure_lists(rows, out), False)
    for place, complaint in ((out[:2], "lengths has 2 entries, not 3"), (memory.array("i", [0] * 3), "lengths is int32")):
        kind = TypeError if "int32" in complaint else ValueError
        refused(f"measured into {complaint}", kind, complaint, module.measure_lists, [[1], [2], [3]], place)
    refused("a tuple of rows to measure", TypeError, "", module.measure_lists, ([1], [2], [3]), out)
    for what, rows, lengths in (
        ("a row shorter than told", [[1, 2]], [3]),
        ("a row longer than told", [[1, 2, 3, 4]], [3]),
        ("a row that is no list", [[1, 2], (3,)], [2, 1]),
        ("a negative length", [[1, 2, 3], []], [3, -1]),
        ("a length beyond memory", [[1, 2, 3]], [HUGE]),
    ):
        equal(what, module.read_lists(rows, memory.array("q", lengths), out), False)
    for kind in "qifB":
        for rows in ([[1, 0], [1]], [[1] * 70, [0] * 70], [[True], [False, True]]):
            lengths = [len(row) for row in rows]
            total = sum(lengths)
            for count in (0, total // 2 + 1, total - 1, total + 1, 200):
                other = memory.array(kind, [0] * count)
                got = module.read_lists(rows, memory.array("q", lengths), other)
                equal(f"{total} numbers into {count} places of {kind}", got, False)
    refused(
        "too few lengths", ValueError, "lengths has 1 entries, not 2", module.read_lists, [[1], [2]], memory.array("q", [2]), out
    )
    refused("a tuple of rows", TypeError, "", module.read_lists, ([1, 2, 3],), memory.array("q", [3]), out)
    refused(
        "read-only memory",
        ValueError,
        "out is no",
        module.read_lists,
        [[1]],
        memory.array("q", [1]),
        memoryview(bytes(8)).cast("q"),
    )
    refused("float64 memory", TypeError, "out is neither", module.read_lists, [[1]], memory.array("q", [1]), memory.array("d", [0]))
    del other, out, place
    memory.returned("refused lists")


def scanned(sizes, capacity):
    """Bins of items, one item and one bin at a time."""
    bins, room = [], []
    for item in sorted(range(len(sizes)), key=lambda number: (-sizes[number], -number)):
        number = next((number for number, free in enumerate(room) if sizes[item] <= free), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        bins[number].append(item)
        room[number] -= sizes[item]
    return bins


def bins_equal_the_scan(module):
    generator = random.Random(0)
    batches = [
        ([], 1),
        ([1], 1),
        ([HUGE], HUGE),
        ([HUGE, 1, HUGE - 1, 1], HUGE),
        ([2**61 + 1] * 9, 2**63 - 1),
        ([6] * 11, 11),
        ([7] * 40, 30),
    ]
    batches += [([generator.choice((2**11, 2**11 + 1, 2**22, 1)) for _ in range(40)], 2**23)]
    for _ in range(150):
        capacity = generator.choice((1, 2, 7, 60, 5000, 10**6, 2**40, HUGE))
        low = generator.choice((1, 1 + capacity // 3, 1 + capacity // 2))
        low, high = min(low, capacity), generator.choice((capacity, 1 + (capacity - 1) // 4))
        batches.append(([generator.randint(min(low, high), max(low, high)) for _ in range(generator.randint(0, 90))], capacity))
    for number, (sizes, capacity) in enumerate(batches):
        memory = Memory()
        items, offsets = memory.array("q", [-7] * len(sizes)), memory.array("q", [-7] * (len(sizes) + 1))
        count = module.first_fit(memory.array("q", sizes, shift=number % 2), capacity, items, offsets)
        expected = scanned(sizes, capacity)
        ends = [0]
        for members in expected:
            ends.append(ends[-1] + len(members))
        equal(f"bins of {sizes} in {capacity}", count, len(expected))
        equal(f"items of {sizes} in {capacity}", list(items), [item for members in expected for item in members])
        equal(f"offsets of {sizes} in {capacity}", list(offsets), ends + [-7] * (len(sizes) - len(expected)))
        del items, offsets
        memory.returned(f"bins {number}")


def bins_are_refused(module):
    memory = Memory()
    shared = memory.array("q", [-7] * 7)
    sizes, items, offsets = memory.array("q", [3, 2, 1]), memory.array("q", [-7] * 3), memory.array("q", [-7] * 4)
    for what, kind, words, arguments in (
        ("a size of 0", ValueError, "item 1 has size 0, bins have 9", (memory.array("q", [3, 0, 1]), 9, items, offsets)),
        ("a negative size", ValueError, "item 2 has size -1", (memory.array("q", [3, 1, -1]), 9, items, offsets)),
        ("a size above the capacity", ValueError, "item 0 has size 3, bins have 2", (sizes, 2, items, offsets)),
        ("no capacity", ValueError, "item 0 has size 3, bins have 0", (sizes, 0, items, offsets)),
        ("a capacity beyond 64 bits", OverflowError, "", (sizes, 2**63, items, offsets)),
        ("too few items", ValueError, "items and offsets have 2 and 4 entries, not 3 and 4", (sizes, 9, items[:2], offsets)),
        ("too few offsets", ValueError, "items and offsets have 3 and 3 entries, not 3 and 4", (sizes, 9, items, offsets[:3])),
        ("too many offsets", ValueError, "not 3 and 4", (sizes, 9, items, shared)),
        ("shared memory", ValueError, "the outputs share memory", (sizes, 9, shared[:3], shared[2:6])),
        ("items of int32", TypeError, "items is int32", (sizes, 9, memory.array("i", [-7] * 3), offsets)),
        ("offsets of int32", TypeError, "offsets is int32", (sizes, 9, items, memory.array("i", [-7] * 4))),
        ("sizes of int32", TypeError, "sizes is int32", (memory.array("i", [1] * 3), 9, items, offsets)),
        ("read-only memory", ValueError, "items is no", (sizes, 9, memoryview(bytes(24)).cast("q"), offsets)),
    ):
        refused(what, kind, words, module.first_fit, *arguments)
        equal(f"after {what}", {*items, *offsets, *shared}, {-7})
    del sizes, items, offsets, shared, arguments
    memory.returned("refused bins")


def nothing_leaks(module):
    """Calls that succeed and calls that fail at each stage leave no memory behind."""
    memory = Memory()
    two, one = memory.array("q", [0, 0]), memory.array("q", [0])
    out, small, numbers = memory.array("q", [0] * 8), memory.array("i", [0] * 8), [[1, 2], [3]]
    calls = [
        (module.write_rows, ((out, 0, "ones"),), two, two, two),
        (module.write_rows, ((out, 0, "ones"),), two, one, two),
        (module.write_rows, ((out, 0, "ones"),), two, two, one),
        (module.write_rows, ((small, 0, "ones"),), two, two, two),
        (module.write_rows, ((out, 0, "twos"),), two, two, two),
        (module.write_gather, out[:0], out[:0], out[:0], two, two, two, two),
        (module.write_gather, out[:0], out[:0], out[:0], two, one, two, two),
        (module.write_gather, out[:1], out[1:2], out[2:3], two, two, two, two),
        (module.write_gather, small, out, out, two, two, two, two),
        (module.first_fit, memory.array("q", [1, 2]), 2, two[:], memory.array("q", [0] * 3)),
        (module.first_fit, memory.array("q", [1, 2]), 1, two[:], memory.array("q", [0] * 3)),
        (module.first_fit, memory.array("q", [1, 2]), 2, two[:], one),
        (module.first_fit, memory.array("q", [1, 2]), 2, two[:], small),
        (module.first_fit, memory.array("q", [1, 2]), 2, small, two),
        (module.measure_lists, numbers, two[:]),
        (module.measure_lists, numbers, one),
        (module.measure_lists, [(1,), [2]], two[:]),
        (module.read_lists, numbers, memory.array("q", [2, 1]), out[:3]),
        (module.read_lists, numbers, memory.array("q", [2, 2]), out[:3]),
        (module.read_lists, numbers, one, out[:3]),
        (module.read_lists, numbers, two, memory.array("d", [0])),
        (module.read_lists, [[10**400]], one, out[:1]),
    ]
    for call in calls:
        repeated(call, 5)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        repeated(call, 200)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 1500, f"{call[0].__name__} leaves {grown} bytes behind after 200 calls with {call[1:]}"
    del calls, call, two, one, out, small
    memory.returned("repeated calls")


def repeated(call, count):
    function, *arguments = call
    for _ in range(count):
        try:
            function(*arguments)
        except (TypeError, ValueError):
            continue


if __name__ == "__main__":
    try:
        main()
    except AssertionError as problem:
        print(problem)
        sys.exit(1)
