"""Random calls of a compiled kernel module, for a process in which a sanitizer watches: `fuzz_kernels.py MODULE CALLS`.

With `overrun` for CALLS the module reads outside its memory, to show that the sanitizer is watching: an array claims to be longer
than its memory.
"""

import ctypes
import random
import sys
from collections import Counter
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import accumulate

ITEM = {"q": 8, "i": 4, "f": 4, "B": 1}


def main() -> None:
    loader = ExtensionFileLoader("_kernels", sys.argv[1])
    module = module_from_spec(spec_from_loader("_kernels", loader))
    loader.exec_module(module)
    if sys.argv[2] == "overrun":
        short = (ctypes.c_int64 * 100_000)()
        longer = (ctypes.c_int64 * 100_100).from_address(ctypes.addressof(short))
        out, one = array("q", [0] * 100_100), array("q", [0])
        module.write_rows(((out, 0, memoryview(longer).cast("B").cast("q")),), one, array("q", [100_100]), one)
        return
    generator = random.Random(0)
    outcomes = Counter()
    for _ in range(int(sys.argv[2])):
        call = generator.choice(CALLS)
        try:
            call(module, generator)
            outcomes[call.__name__, "written"] += 1
        except (TypeError, ValueError, OverflowError, MemoryError):
            outcomes[call.__name__, "refused"] += 1
    print(dict(outcomes))
    assert len(outcomes) == 2 * len(CALLS)
    assert min(outcomes.values()) > 100


def array(kind, values):
    """Memory of exactly this size, each array its own allocation."""
    view = memoryview(bytearray(len(values) * ITEM[kind])).cast(kind)
    for place, value in enumerate(values):
        view[place] = value
    return view


def make_blank(kind, count):
    return array(kind, [0] * count)


def bend_values(generator, values):
    """The values, or in one of four calls with one of them changed for something extreme."""
    if values and generator.random() < 0.25:
        values[generator.randrange(len(values))] = generator.choice((-1, 0, 1, 5, 30, 2**31, 2**62, 2**63 - 1, -(2**63)))
    return array("q", values)


def random_rows(module, generator):
    available, starts, lengths, places, end = generator.randint(0, 20), [], [], [], 0
    for _ in range(generator.randint(0, 8)):
        starts.append(generator.randint(0, available))
        lengths.append(generator.randint(0, available - starts[-1]))
        places.append(end + generator.randint(0, 4))
        end = places[-1] + lengths[-1]
    total = max(0, end + generator.choice((0, 0, 0, 3, -1)))
    fields = []
    for _ in range(generator.randint(0, 5)):
        out, sources = generator.choice((("q", "qi1c"), ("q", "qi1c"), ("f", "fB"), ("f", "fB"), ("i", "i")))
        source = generator.choice(sources)
        count = max(0, available + generator.choice((0, 0, 0, 0, 1, -1)))
        source_name = {"1": "ones", "c": "counted"}.get(source) or make_blank(source, count)
        fill = generator.choice((0, 0, 151_643, -1)) if out == "q" else 0
        fields.append((make_blank(out, total + generator.choice((0,) * 30 + (1,))), fill, source_name))
    module.write_rows(
        tuple(fields), bend_values(generator, starts), bend_values(generator, lengths), bend_values(generator, places)
    )


def random_gather(module, generator):
    samples = generator.randint(0, 6)
    counts = [generator.randint(0, 9) for _ in range(samples)]
    scored = [generator.randint(max(0, count - 1), count) for count in counts]
    entries = max(0, sum(scored) + generator.choice((0, 0, 0, 1, -1)))
    rows, columns = ([generator.randint(0, 99) for _ in range(samples)] for _ in range(2))
    inputs = [bend_values(generator, values) for values in (rows, counts, scored, columns)]
    module.write_gather(*(make_blank("q", entries) for _ in range(3)), *inputs)


def random_lists(module, generator):
    values = (0, 1, True, 151_643, 2**31, 2**63, 0.5, -0.0, float("nan"))[: generator.randint(1, 9)]
    rows = [
        [generator.choice(values) for _ in range(generator.randint(0, generator.choice((5, 50, 400))))]
        for _ in range(generator.randint(0, 5))
    ]
    if rows and generator.random() < 0.2:
        generator.choice(rows).append(generator.choice((None, "1", 10**400, [1])))
    total = max(0, sum(map(len, rows)) + generator.choice((0, 0, 0, 1, -1)))
    module.measure_lists(rows, make_blank("q", max(0, len(rows) + generator.choice((0, 0, 0, 0, 1, -1)))))
    if not module.read_lists(rows, bend_values(generator, [len(row) for row in rows]), make_blank(generator.choice("qifB"), total)):
        raise ValueError


def random_bins(module, generator):
    count, capacity = generator.randint(0, 40), generator.choice((1, 9, 9, 9, 2**40, 2**63 - 1))
    sizes = bend_values(generator, [generator.randint(1, capacity) for _ in range(count)])
    entries = (max(0, count + extra + generator.choice((0,) * 8 + (1, -1))) for extra in (0, 1))
    module.first_fit(sizes, capacity, *(make_blank("q", number) for number in entries))


def random_padded(module, generator):
    """Micro-batches of rows with a sample or none, as wide as their samples need, a little wider, or too narrow."""
    tokens = [generator.randint(1, 9) for _ in range(generator.randint(1, 6))]
    actions = [generator.randint(0, count) for count in tokens]
    samples, row_offsets, shapes, contents = [], [], [], generator.choice(("tmp", "t", "pm", "", "tmp", "x"))
    for _ in range(generator.randint(0, 3)):
        filled = [generator.random() < 0.8 for _ in range(generator.randint(0, 4))]
        own = [generator.randrange(len(tokens)) for count in filled if count]
        row_offsets += [0, *accumulate(filled)]
        slack = generator.choice((0, 0, 0, 2, -1))
        widths = [max((counts[sample] for sample in own), default=1) + slack for counts in (tokens, actions)]
        shapes.append((len(filled), *(generator.choice((width,) * 40 + (2**62,)) for width in widths)))
        samples += own
    cells = sum(rows * width for rows, width, _ in shapes if width < 99) * len(contents)
    scored = sum(actions[sample] - (actions[sample] == tokens[sample]) for sample in samples)
    out, index, lengths = (
        make_blank("q", max(0, count + generator.choice((0,) * 12 + (1, -1)))) for count in (cells, 3 * scored, len(samples))
    )
    input_ids = make_blank(generator.choice("qiqiB"), max(0, sum(tokens) + generator.choice((0,) * 12 + (-1,))))
    offsets = [
        bend_values(generator, [0, *accumulate(counts)]) if generator.random() < 0.2 else array("q", [0, *accumulate(counts)])
        for counts in (tokens, actions)
    ]
    chosen = bend_values(generator, samples) if generator.random() < 0.2 else array("q", samples)
    ends = bend_values(generator, row_offsets) if generator.random() < 0.2 else array("q", row_offsets)
    module.count_scored(chosen, *offsets)
    module.write_padded(
        out, contents, index, lengths, input_ids, *offsets, chosen, ends, tuple(shapes), generator.choice((0, 151_643, -1))
    )


def random_balance(module, generator):
    count, ranks = generator.randint(0, 40), generator.choice((1, 2, 3, 9, 0, 2**62))
    most = generator.choice((count, -(-count // max(ranks, 1)), 1, 0))
    costs = bend_values(generator, [generator.randint(0, 99) for _ in range(count)])
    module.balance(costs, ranks, most, make_blank("q", max(0, count + generator.choice((0,) * 12 + (1, -1)))))


CALLS = (random_rows, random_gather, random_lists, random_bins, random_padded, random_balance)

if __name__ == "__main__":
    main()
