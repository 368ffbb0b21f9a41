"""Check a compiled kernel module in a process of its own: `check_kernels.py MODULE`.

Prints the first thing that is wrong and ends with 1. Everything is compared with plain loops over Python numbers. Memory is bytearrays of
exactly the size that is needed, so that a sanitizer sees each overrun; a bytearray cannot grow while it is borrowed, which shows whether it
was given back. Without NumPy, because this process starts once for every mutant of the kernels.
"""

import sys
import tracemalloc
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

from kernel_bins import check_bins_are_refused, check_bins_equal_scan
from kernel_lists import check_lists_equal_python
from kernel_memory import Memory
from kernel_padded import check_padded_equals_loop, check_padded_is_refused, check_ranks_are_refused, check_ranks_equal_scan
from kernel_rows import check_gathers_are_refused, check_gathers_equal_loop, check_rows_are_refused, check_rows_equal_loop


def main() -> None:
    loader = ExtensionFileLoader("_kernels", sys.argv[1])
    module = module_from_spec(spec_from_loader("_kernels", loader))
    loader.exec_module(module)
    assert int(sys.argv[2]) == module.INTERFACE, f"interface {module.INTERFACE}"
    for check in (
        check_rows_equal_loop,
        check_rows_are_refused,
        check_gathers_equal_loop,
        check_gathers_are_refused,
        check_lists_equal_python,
        check_bins_equal_scan,
        check_bins_are_refused,
        check_padded_equals_loop,
        check_padded_is_refused,
        check_ranks_equal_scan,
        check_ranks_are_refused,
        check_nothing_leaks,
    ):
        check(module)
        print(f"{check.__name__}: as it should be", flush=True)


def check_nothing_leaks(module):
    """Calls that succeed and calls that fail at each stage leak no memory."""
    memory = Memory()
    two, short = memory.array("q", [0, 0]), memory.array("q", [0])
    out, small, numbers = memory.array("q", [0] * 8), memory.array("i", [0] * 8), [[1, 2], [3]]
    calls = [
        (module.write_rows, ((out, 0, "ones"),), two, two, two),
        (module.write_rows, ((out, 0, "ones"),), two, short, two),
        (module.write_rows, ((out, 0, "ones"),), two, two, short),
        (module.write_rows, ((small, 0, "ones"),), two, two, two),
        (module.write_rows, ((out, 0, "twos"),), two, two, two),
        (module.write_gather, out[:0], out[:0], out[:0], two, two, two, two),
        (module.write_gather, out[:0], out[:0], out[:0], two, short, two, two),
        (module.write_gather, out[:1], out[1:2], out[2:3], two, two, two, two),
        (module.write_gather, small, out, out, two, two, two, two),
        (module.first_fit, memory.array("q", [1, 2]), 2, two[:], memory.array("q", [0] * 3)),
        (module.first_fit, memory.array("q", [1, 2]), 1, two[:], memory.array("q", [0] * 3)),
        (module.first_fit, memory.array("q", [1, 2]), 2, two[:], short),
        (module.first_fit, memory.array("q", [1, 2]), 2, two[:], small),
        (module.first_fit, memory.array("q", [1, 2]), 2, small, two),
        (module.count_scored, short, memory.array("q", [0, 2]), memory.array("q", [0, 1])),
        (module.count_scored, short, memory.array("q", [0, 2]), two[:1]),
        (module.write_padded, out[:2], "t", out[2:5], out[5:6], small, memory.array("q", [0, 2]), two, short, two, ((1, 2, 0),), 0),
        (
            *(module.write_padded, out[:2], "t", out[2:5], out[5:6], small[:2], memory.array("q", [0, 2])),
            *(memory.array("q", [0, 1]), short, memory.array("q", [0, 1]), ((1, 2, 1),), 0),
        ),
        (
            *(module.write_padded, out[:2], "t", out[2:5], out[5:6], small[:2], memory.array("q", [0, 2])),
            *(memory.array("q", [0, 1]), short, memory.array("q", [0, 1]), ((1, 1, 1),), 0),
        ),
        (
            *(module.write_padded, out[:1], "t", out[2:5], out[5:6], small[:2], memory.array("q", [0, 2])),
            *(memory.array("q", [0, 1]), short, memory.array("q", [0, 1]), ((1, 2, 1),), 0),
        ),
        (module.balance, two, 2, 1, two[:]),
        (module.balance, two, 1, 1, two[:]),
        (module.balance, memory.array("q", [-1, 0]), 2, 1, two[:]),
        (module.measure_lists, numbers, two[:]),
        (module.measure_lists, numbers, short),
        (module.measure_lists, [(1,), [2]], two[:]),
        (module.read_lists, numbers, memory.array("q", [2, 1]), out[:3]),
        (module.read_lists, numbers, memory.array("q", [2, 2]), out[:3]),
        (module.read_lists, numbers, short, out[:3]),
        (module.read_lists, numbers, two, memory.array("d", [0])),
        (module.read_lists, [[10**400]], short, out[:1]),
    ]
    for call in calls:
        repeat_calls(call, 5)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        repeat_calls(call, 200)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 1500, f"{call[0].__name__} leaves {grown} bytes behind after 200 calls with {call[1:]}"
    del calls, call, two, short, out, small
    memory.require_returned("repeated calls")


def repeat_calls(call, count):
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
