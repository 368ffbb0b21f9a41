"""Dense rows and gather indices that compiled kernels write, against plain loops; and what they must refuse to write."""

import ctypes
import random
import struct

from kernel_memory import HUGE, SIZE, SPECIAL, Memory, require_equal, require_refusal

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


def check_rows_equal_loop(module):
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
            require_equal(f"rows {number} from {content}", out.tobytes(), wanted)
        del out, source, fields
        memory.require_returned(f"rows {number}")


def check_rows_are_refused(module):
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
    for label, kind, words, change in cases:
        base = {"out": [7] * 10, "fill": 0, "source": range(6), "starts": [0, 3], "lengths": [3, 3], "places": [1, 5]}
        arguments = {
            name: memory.array("q", value) if isinstance(value, list | range) else value
            for name, value in {**base, **change}.items()
        }
        first, longest = memory.array("q", [7] * 10), memory.array("q", range(6))
        out = arguments["out"]
        before = out.tobytes()
        fields = ((first, 0, longest), (out, arguments["fill"], arguments["source"]))
        require_refusal(
            label, kind, words, module.write_rows, fields, *(arguments[name] for name in ("starts", "lengths", "places"))
        )
        require_equal(label, (first.tolist(), out.tobytes()), ([7] * 10, before))
        del fields, out, arguments, change
    outputs = memory.array("q", [7] * 20)
    where = [memory.array("q", [0]) for _ in range(3)]
    overlapping = ((outputs[:10], 0, "ones"), (outputs[9:19], 0, "ones"))
    require_refusal("outputs that share an element", ValueError, "shares memory", module.write_rows, overlapping, *where)
    require_refusal("fields in a list", TypeError, "tuple", module.write_rows, [(outputs, 0, "ones")], *where)
    require_refusal("a field of two", TypeError, "a field is", module.write_rows, ((outputs, 0),), *where)
    module.write_rows(((outputs[:10], 3, "ones"), (outputs[10:], 4, "ones")), *where)
    require_equal("outputs side by side", outputs.tolist(), [3] * 10 + [4] * 10)
    require_equal("no field at all", module.write_rows((), *where), None)
    del cases, strided, shared, numbers, overlapping
    memory.require_returned("refused rows")


def check_gathers_equal_loop(module):
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
        require_equal(f"gather {number}", list(zip(*(out.tolist() for out in outputs), strict=True)), expected)
        del outputs
        memory.require_returned(f"gather {number}")


def check_gathers_are_refused(module):
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
    for label, kind, words, change in cases:
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
        require_refusal(label, kind, words, module.write_gather, *(arguments[name] for name in (*outputs, *inputs)))
        require_equal(label, [arguments[name].tobytes() for name in outputs], before)
        del arguments, change
    block = memory.array("q", [-7] * 12)
    arrays = [memory.array("q", values) for values in ([0, 1], [2, 2], [2, 2], [0, 0])]
    for label, slices in (
        ("actions on rows", (block[0:4], block[3:7], block[8:12])),
        ("actions on columns", (block[0:4], block[8:12], block[3:7])),
        ("rows on columns", (block[8:12], block[0:4], block[3:7])),
    ):
        require_refusal(label, ValueError, "share memory", module.write_gather, *slices, *arrays)
        require_equal(label, block.tolist(), [-7] * 12)
    module.write_gather(block[0:4], block[4:8], block[8:12], *arrays)
    require_equal("outputs side by side", block.tolist(), [0, 1, 2, 3, 0, 0, 1, 1, 0, 1, 0, 1])
    del slices, cases
    memory.require_returned("refused gathers")
