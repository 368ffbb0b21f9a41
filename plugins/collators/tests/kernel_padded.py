"""Padded micro-batches and balanced ranks of compiled kernels, against plain loops; and what they must refuse to write."""

import random

from kernel_memory import HUGE, Memory, require_equal, require_refusal

FILL = -7


def draw_case(generator):
    """Columns, the samples chosen of them, their rows, and the shapes of one or several micro-batches."""
    tokens = [generator.randint(1, 6) for _ in range(generator.randint(1, 6))]
    actions = [generator.choice((0, count, generator.randint(0, count))) for count in tokens]
    samples, row_offsets, shapes = [], [], []
    for _ in range(generator.randint(0, 3)):
        rows = [generator.choice((0, 1, 1)) for _ in range(generator.randint(0, 4))]
        own = [generator.randrange(len(tokens)) for _ in range(sum(rows))]
        row_offsets += [sum(rows[:row]) for row in range(len(rows) + 1)]
        width = max((tokens[sample] for sample in own), default=0) + generator.choice((0, 0, 2))
        shapes.append((len(rows), width, max((actions[sample] for sample in own), default=0)))
        samples += own
    ids = [generator.choice((0, 5, 151_643, 2**31 - 1)) for _ in range(sum(tokens))]
    return ids, tokens, actions, samples, row_offsets, tuple(shapes)


def offsets(lengths):
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


def pad_by_loop(case, contents, pad):
    """The dense cells, the three parts of the index, the lengths, and how many entries each micro-batch has."""
    ids, tokens, actions, samples, row_offsets, shapes = case
    begins, out, index, lengths, counts = offsets(tokens), [], [[], [], []], [], []
    for rows, width, _ in shapes:
        ends, row_offsets = row_offsets[: rows + 1], row_offsets[rows + 1 :]
        own, samples = samples[: ends[-1]], samples[ends[-1] :]
        lengths += [tokens[sample] for sample in own]
        for letter in contents:
            for row in range(rows):
                cells = [pad if letter == "t" else 0] * width
                for sample in own[ends[row] : ends[row + 1]]:
                    for place in range(tokens[sample]):
                        value = {"t": ids[begins[sample] + place], "m": 1, "p": place}[letter]
                        cells[width - tokens[sample] + place] = value
                out += cells
        before = count = 0
        for row in range(rows):
            for sample in own[ends[row] : ends[row + 1]]:
                for action in range(actions[sample]):
                    column = width - actions[sample] + action - 1
                    if column >= width - tokens[sample]:
                        index[0].append(before + action)
                        index[1].append(row)
                        index[2].append(column)
                        count += 1
                before += actions[sample]
        counts.append(count)
    return out, [entry for part in index for entry in part], lengths, tuple(counts)


def check_padded_equals_loop(module):
    generator = random.Random(0)
    for number in range(250):
        case = draw_case(generator)
        ids, tokens, actions, samples, row_offsets, shapes = case
        contents = "".join(generator.sample("tmp", generator.randint(0, 3)))
        pad = generator.choice((0, 151_643, -1, HUGE))
        out, index, lengths, counts = pad_by_loop(case, contents, pad)
        memory, shift = Memory(), number % 2
        kind = generator.choice("qi")
        outputs = [memory.array("q", [FILL] * len(values)) for values in (out, index, lengths)]
        inputs = [memory.array(kind, ids, shift=shift)]
        inputs += [memory.array("q", values, shift=shift) for values in (offsets(tokens), offsets(actions), samples, row_offsets)]
        scored = module.count_scored(inputs[3], inputs[1], inputs[2])
        require_equal(f"scored tokens of {case}", scored, sum(counts))
        padded = module.write_padded(outputs[0], contents, *outputs[1:], *inputs, shapes, pad)
        require_equal(f"counts of {case}", padded, counts)
        for name, values, wanted in zip(("cells", "index", "lengths"), outputs, (out, index, lengths), strict=True):
            require_equal(f"{name} of {case} with {contents}", list(values), wanted)
        del outputs, inputs, values
        memory.require_returned(f"padded {number}")


def check_padded_is_refused(module):
    """One change each to arguments that fit: samples of 3 and 2 tokens, 2 of them response, in two rows of 3."""
    memory = Memory()
    names = (
        "out",
        "contents",
        "index",
        "lengths",
        "input_ids",
        "token_offsets",
        "action_offsets",
        "samples",
        "row_offsets",
        "shapes",
    )
    fit = {
        "out": memory.array("q", [FILL] * 18),
        "contents": "tmp",
        "index": memory.array("q", [FILL] * 9),
        "lengths": memory.array("q", [FILL] * 2),
        "input_ids": memory.array("i", [1, 2, 3, 4, 5]),
        "token_offsets": memory.array("q", [0, 3, 5]),
        "action_offsets": memory.array("q", [0, 2, 4]),
        "samples": memory.array("q", [0, 1]),
        "row_offsets": memory.array("q", [0, 1, 2]),
        "shapes": ((2, 3, 2),),
    }
    shared = memory.array("q", [FILL] * 40)
    cases = [
        ("a sample that is not there", ValueError, "no sample 2", {"samples": [0, 2]}),
        ("a negative sample", ValueError, "no sample -1", {"samples": [0, -1]}),
        ("a sample that overflows", ValueError, f"no sample {HUGE}", {"samples": [0, HUGE]}),
        ("tokens that begin before", ValueError, "token_offsets go from -1 to 3 of 5", {"token_offsets": [-1, 3, 5]}),
        ("tokens that fall", ValueError, "token_offsets go from 3 to 2", {"token_offsets": [0, 3, 2]}),
        ("tokens one beyond", ValueError, "token_offsets go from 3 to 6 of 5", {"token_offsets": [0, 3, 6]}),
        ("actions that fall", ValueError, "action_offsets go from 2 to 1", {"action_offsets": [0, 2, 1]}),
        ("too few action offsets", ValueError, "action_offsets has 2 entries, not 3", {"action_offsets": [0, 2]}),
        ("more actions than tokens", ValueError, "sample 1 has 3 response tokens of 2", {"action_offsets": [0, 2, 5]}),
        (
            "a sample without a token",
            ValueError,
            "sample 1 has 0 response tokens of 0",
            {"token_offsets": [0, 3, 3], "action_offsets": [0, 2, 2]},
        ),
        ("rows from 1 on", ValueError, "begin with 1", {"row_offsets": [1, 1, 2]}),
        ("two samples in a row", ValueError, "row 0 begins at sample 0, the row behind it at 2", {"row_offsets": [0, 2, 2]}),
        ("rows that fall", ValueError, "row 1 begins at sample 1, the row behind it at 0", {"row_offsets": [0, 1, 0]}),
        (
            "a row beyond the samples",
            ValueError,
            "row 1 begins at sample 1, the row behind it at 2 of 1",
            {"samples": [0], "lengths": [FILL]},
        ),
        ("samples without a row", ValueError, "1 of 2 samples", {"row_offsets": [0, 1, 1]}),
        ("offsets left over", ValueError, "3 of 4 row_offsets", {"row_offsets": [0, 1, 2, 2]}),
        ("offsets too few", ValueError, "and 2 offsets", {"row_offsets": [0, 1]}),
        ("a second shape without offsets", ValueError, "and 0 offsets", {"shapes": ((2, 3, 2), (0, 0, 0))}),
        ("rows that are negative", ValueError, "-1 rows", {"shapes": ((-1, 3, 2),)}),
        ("a negative width", ValueError, "2 rows of -3", {"shapes": ((2, -3, 2),)}),
        ("a negative action width", ValueError, "of 3 and -2", {"shapes": ((2, 3, -2),)}),
        (
            "a sample one too long",
            ValueError,
            "row 0 needs 3 tokens and 2 response tokens, it has 2 and 2",
            {"shapes": ((2, 2, 2),)},
        ),
        (
            "a response one too long",
            ValueError,
            "row 0 needs 3 tokens and 2 response tokens, it has 3 and 1",
            {"shapes": ((2, 3, 1),)},
        ),
        ("a width that overflows", ValueError, "too few for 3 fields", {"shapes": ((2, HUGE, 2),)}),
        ("a shape of two", TypeError, "a shape is (rows, width, action_width)", {"shapes": ((2, 3),)}),
        ("a shape that is none", TypeError, "a shape is a tuple", {"shapes": (3,)}),
        ("no shapes", TypeError, "tuple", {"shapes": [(2, 3, 2)]}),
        ("a cell too few", ValueError, "out has 17 elements, too few", {"out": [FILL] * 17}),
        ("a cell too many", ValueError, "out has 1 elements too many", {"out": [FILL] * 19}),
        ("other contents", ValueError, "contents are of t, m and p", {"contents": "tmx"}),
        ("an entry too few", ValueError, "index has 6 elements for 3 scored tokens", {"index": [FILL] * 6}),
        ("an entry too many", ValueError, "index has 12 elements for 3 scored tokens", {"index": [FILL] * 12}),
        ("an entry no multiple of three", ValueError, "index has 10 elements for 3", {"index": [FILL] * 10}),
        ("a length too few", ValueError, "lengths has 1 entries, not 2", {"lengths": [FILL]}),
        ("cells over the index", ValueError, "share memory", {"out": shared[:18], "index": shared[17:26]}),
        ("cells over the lengths", ValueError, "share memory", {"out": shared[:18], "lengths": shared[17:19]}),
        ("the index over the lengths", ValueError, "share memory", {"index": shared[:9], "lengths": shared[8:10]}),
        ("cells over the tokens", ValueError, "share memory", {"out": shared[:18], "input_ids": shared[17:22]}),
        ("the index over the tokens", ValueError, "share memory", {"index": shared[:9], "input_ids": shared[8:13]}),
        ("lengths over the tokens", ValueError, "share memory", {"lengths": shared[:2], "input_ids": shared[1:6]}),
        ("tokens of float32", TypeError, "input_ids is neither int64 nor int32", {"input_ids": memory.array("f", [0] * 5)}),
        ("cells of int32", TypeError, "out is int32", {"out": memory.array("i", [FILL] * 18)}),
        ("an index of int32", TypeError, "index is int32", {"index": memory.array("i", [FILL] * 9)}),
        ("lengths of int32", TypeError, "lengths is int32", {"lengths": memory.array("i", [FILL] * 2)}),
        ("samples of int32", TypeError, "samples is int32", {"samples": memory.array("i", [0, 1])}),
        ("token offsets of int32", TypeError, "token_offsets is int32", {"token_offsets": memory.array("i", [0, 3, 5])}),
        ("action offsets of int32", TypeError, "action_offsets is int32", {"action_offsets": memory.array("i", [0, 2, 4])}),
        ("row offsets of int32", TypeError, "row_offsets is int32", {"row_offsets": memory.array("i", [0, 1, 2])}),
        ("read-only cells", ValueError, "out is no", {"out": memoryview(bytes(144)).cast("q")}),
    ]
    for label, kind, words, changes in cases:
        changed = {
            name: memory.array("q", values) if type(values) is list and name != "shapes" else values
            for name, values in changes.items()
        }
        arguments = [{**fit, **changed}[name] for name in names]
        require_refusal(label, kind, words, module.write_padded, *arguments, 0)
        for name in ("out", "index", "lengths"):
            values = {**fit, **changed}[name]
            require_equal(f"{name} after {label}", set(values) - {0}, set() if values.readonly else {FILL})
    require_refusal(
        "a count of a sample that is not there",
        ValueError,
        "no sample 2",
        module.count_scored,
        memory.array("q", [2]),
        fit["token_offsets"],
        fit["action_offsets"],
    )
    module.write_padded(*fit.values(), 0)
    require_equal("what fits", list(fit["out"][:6]), [1, 2, 3, 0, 4, 5])
    del fit, shared, cases, changes, changed, arguments, values
    memory.require_returned("refused padded rows")


def check_ranks_equal_scan(module):
    generator = random.Random(0)
    for number in range(200):
        ranks = generator.randint(1, 9)
        costs = [generator.choice((0, 1, 1, 5, generator.randint(0, 2**40))) for _ in range(generator.randint(0, 30))]
        most = -(-len(costs) // ranks) + generator.choice((0, 0, 1, 30))
        loads, counts, wanted = [0] * ranks, [0] * ranks, []
        for cost in costs:
            rank = min((rank for rank in range(ranks) if counts[rank] < most), key=lambda rank: loads[rank])
            loads[rank] += cost
            counts[rank] += 1
            wanted.append(rank)
        memory = Memory()
        chosen = memory.array("q", [FILL] * len(costs))
        module.balance(memory.array("q", costs, shift=number % 2), ranks, most, chosen)
        require_equal(f"ranks of {costs} over {ranks} of {most}", list(chosen), wanted)
        del chosen
        memory.require_returned(f"ranks {number}")


def check_ranks_are_refused(module):
    memory = Memory()
    costs, chosen = memory.array("q", [3, 2, 1]), memory.array("q", [FILL] * 3)
    for label, kind, words, arguments in (
        ("a negative cost", ValueError, "item 1 of cost -1", (memory.array("q", [3, -1, 1]), 2, 3, chosen)),
        ("costs that overflow", ValueError, f"item 2 of cost {HUGE}", (memory.array("q", [0, 1, HUGE]), 2, 3, chosen)),
        ("no rank", ValueError, "0 ranks of at most 3", (costs, 0, 3, chosen)),
        ("no rank and no item", ValueError, "0 ranks of at most 0", (costs[:0], 0, 0, chosen[:0])),
        ("no room", ValueError, "2 ranks of at most 1 have no room for 3", (costs, 2, 1, chosen)),
        ("no items per rank", ValueError, "at most 0", (costs, 2, 0, chosen)),
        ("negative room", ValueError, "at most -1", (costs, 2, -1, chosen)),
        ("too few chosen", ValueError, "chosen has 2 entries, not 3", (costs, 2, 3, chosen[:2])),
        ("chosen of int32", TypeError, "chosen is int32", (costs, 2, 3, memory.array("i", [FILL] * 3))),
        ("costs of int32", TypeError, "costs is int32", (memory.array("i", [1] * 3), 2, 3, chosen)),
    ):
        require_refusal(label, kind, words, module.balance, *arguments)
        require_equal(f"after {label}", set(chosen), {FILL})
    del costs, chosen, arguments
    memory.require_returned("refused ranks")
