"""Bins that compiled kernels fill, against a scan of one item and one bin at a time."""

import random

from kernel_memory import HUGE, Memory, require_equal, require_refusal


def scan_bins(sizes, capacity):
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


def check_bins_equal_scan(module):
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
        expected = scan_bins(sizes, capacity)
        ends = [0]
        for members in expected:
            ends.append(ends[-1] + len(members))
        require_equal(f"bins of {sizes} in {capacity}", count, len(expected))
        require_equal(f"items of {sizes} in {capacity}", list(items), [item for members in expected for item in members])
        require_equal(f"offsets of {sizes} in {capacity}", list(offsets), ends + [-7] * (len(sizes) - len(expected)))
        del items, offsets
        memory.require_returned(f"bins {number}")


def check_bins_are_refused(module):
    memory = Memory()
    shared = memory.array("q", [-7] * 7)
    sizes, items, offsets = memory.array("q", [3, 2, 1]), memory.array("q", [-7] * 3), memory.array("q", [-7] * 4)
    for label, kind, words, arguments in (
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
        require_refusal(label, kind, words, module.first_fit, *arguments)
        require_equal(f"after {label}", {*items, *offsets, *shared}, {-7})
    del sizes, items, offsets, shared, arguments
    memory.require_returned("refused bins")
