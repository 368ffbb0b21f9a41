"""Python lists that compiled kernels read, against what Python itself says of the numbers."""

import ctypes
import random
import struct
import sys

from kernel_memory import HUGE, Memory, require_equal, require_refusal


class Whole(int):
    """No int itself."""


def check_lists_equal_python(module):
    """Python's verdict on the numbers decides what must have been read, or that nothing may be."""
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
            require_equal(f"lists of list {number}", module.measure_lists(rows, measured), True)
            require_equal(f"lengths of list {number}", list(measured), [len(row) for row in rows])
            items = [value for value in flat if type(value) in (int, float) and value not in range(-5, 257)]
            counts = [sys.getrefcount(value) for value in items]
            lists = module.read_lists(rows, memory.array("q", [len(row) for row in rows]), out)
            require_equal(f"list {number} as {kind}", lists, expected)
            require_equal(f"references to the numbers of list {number}", [sys.getrefcount(value) for value in items], counts)
            if expected:
                wanted = [ctypes.c_float(value).value for value in flat] if kind == "f" else list(map(int, flat))
                require_equal(f"numbers of list {number} as {kind}", out.tobytes(), struct.pack(f"{len(flat)}{kind}", *wanted))
            del out, measured
            memory.require_returned(f"list {number}")
    memory = Memory()
    out = memory.array("q", [0] * 3)
    for rows in ([[1], (2,), [3]], [[1], [2], None], [{}, [1], [2]]):
        require_equal(f"{rows} are lists", module.measure_lists(rows, out), False)
    for place, complaint in ((out[:2], "lengths has 2 entries, not 3"), (memory.array("i", [0] * 3), "lengths is int32")):
        kind = TypeError if "int32" in complaint else ValueError
        require_refusal(f"measured into {complaint}", kind, complaint, module.measure_lists, [[1], [2], [3]], place)
    require_refusal("a tuple of rows to measure", TypeError, "", module.measure_lists, ([1], [2], [3]), out)
    for label, rows, lengths in (
        ("a row shorter than declared", [[1, 2]], [3]),
        ("a row longer than declared", [[1, 2, 3, 4]], [3]),
        ("a row that is no list", [[1, 2], (3,)], [2, 1]),
        ("a negative length", [[1, 2, 3], []], [3, -1]),
        ("a length beyond memory", [[1, 2, 3]], [HUGE]),
    ):
        require_equal(label, module.read_lists(rows, memory.array("q", lengths), out), False)
    for kind in "qifB":
        for rows in ([[1, 0], [1]], [[1] * 70, [0] * 70], [[True], [False, True]]):
            lengths = [len(row) for row in rows]
            total = sum(lengths)
            for count in (0, total // 2 + 1, total - 1, total + 1, 200):
                other = memory.array(kind, [0] * count)
                lists = module.read_lists(rows, memory.array("q", lengths), other)
                require_equal(f"{total} numbers into {count} places of {kind}", lists, False)
    require_refusal(
        "too few lengths", ValueError, "lengths has 1 entries, not 2", module.read_lists, [[1], [2]], memory.array("q", [2]), out
    )
    require_refusal("a tuple of rows", TypeError, "", module.read_lists, ([1, 2, 3],), memory.array("q", [3]), out)
    require_refusal(
        "read-only memory",
        ValueError,
        "out is no",
        module.read_lists,
        [[1]],
        memory.array("q", [1]),
        memoryview(bytes(8)).cast("q"),
    )
    require_refusal(
        "float64 memory", TypeError, "out is neither", module.read_lists, [[1]], memory.array("q", [1]), memory.array("d", [0])
    )
    del other, out, place
    memory.require_returned("refused lists")
