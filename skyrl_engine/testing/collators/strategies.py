"""Hypothesis strategies for collators: samples with every extreme value, their lengths, and layouts that they fit into."""

from collections.abc import Collection, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import Factory, evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.collator import Carried
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.extras import EXPERT_ROUTES, IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES
from skyrl_engine.contracts.values.plan import Layout, SampleLengths
from skyrl_engine.contracts.values.prefixes import CommonPrefixes
from skyrl_engine.contracts.values.ragged import AnyArray

COLUMN_NAMES = ("rewards", "rollout_logprobs", "advantages", "a_column_of_my_own")
SMALLEST_DENORMAL = float(np.finfo(np.float32).smallest_subnormal)


@frozen
class SampleLists:
    """Samples as Python lists, the way a caller has them; one entry per sample, numbers per response token.

    `extras` by name: one array per sample, or None where a sample has none.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    loss_masks: list[list[float]] | list[list[int]]
    columns: Mapping[str, list[Any]]
    sample_ids: list[int]
    group_ids: list[int]
    unit_ids: list[int]
    extras: Mapping[str, list[AnyArray | None]] = Factory(dict)

    @property
    def ids(self) -> dict[str, Any]:
        """Return the keyword arguments that name samples, groups and units."""
        ids = {"sample_ids": self.sample_ids, "group_ids": self.group_ids, "unit_ids": self.unit_ids}
        return {name: np.asarray(values, dtype=np.int64) for name, values in ids.items()}

    def to_columns(self) -> SampleColumns:
        return SampleColumns.from_rollouts(
            prompts=self.prompts,
            responses=self.responses,
            loss_masks=self.loss_masks,
            columns=self.columns,
            extras=self.extras,
            **self.ids,
        )


def token_ids() -> st.SearchStrategy[int]:
    """Ordinary ids, and ids beyond what int32 holds."""
    return st.one_of(st.integers(0, 300), st.integers(2**31 - 2, 2**31 + 2), st.integers(2**62, 2**63 - 1))


def numbers() -> st.SearchStrategy[float]:
    """Values that float32 holds: ordinary ones, both zeros, NaN, infinities and denormals."""
    special = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), SMALLEST_DENORMAL, -SMALLEST_DENORMAL, 1.0)
    return st.one_of(st.sampled_from(special), st.floats(width=32))


def weights() -> st.SearchStrategy[float]:
    """Finite loss weights: masks, fractions, negative ones, both zeros, denormals."""
    special = (0.0, -0.0, 1.0, 0.5, 1 / 3, SMALLEST_DENORMAL)
    return st.one_of(
        st.sampled_from([float(np.float32(value)) for value in special]),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
    )


@st.composite
def expert_routes(draw: st.DrawFn, lengths: list[int]) -> list[AnyArray | None]:
    """Routes [captured, layers, topk] of samples of these lengths: prefixes of all sizes, experts at the edge of every dtype."""
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, choices = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    edges = st.sampled_from((2, 200, 255, 256, 32767, 32768, 2**31 - 1))
    routes: list[AnyArray | None] = []
    for length in lengths:
        captured = draw(st.just(length) | st.integers(1, length))
        largest = draw(edges) if draw(st.booleans()) else 2
        dtype = draw(st.sampled_from([kind for kind in ("uint8", "int16", "int32", "int64") if largest <= np.iinfo(kind).max]))
        sample_routes = numbers.integers(0, largest, (captured, layers, choices), endpoint=True).astype(dtype)
        sample_routes[captured - 1, layers - 1, 0] = largest
        routes.append(sample_routes)
    return routes


@st.composite
def images(draw: st.DrawFn, lengths: list[int]) -> dict[str, list[AnyArray | None]]:
    """Images of samples of these lengths, with any bits as pixels; some samples have several, some none, some no token types."""
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)).filter(any))
    extras: dict[str, list[AnyArray | None]] = {PIXEL_VALUES: [], IMAGE_GRID: [], TOKEN_TYPES: []}
    for length, count in zip(lengths, counts, strict=True):
        grid = numbers.integers(1, 3, (count, 3))
        pixels = numbers.integers(0, 2**32, (int(grid.prod(axis=1).sum()), width), dtype=np.uint32).view(np.float32)
        extras[PIXEL_VALUES].append(pixels if count else None)
        extras[IMAGE_GRID].append(grid if count else None)
        extras[TOKEN_TYPES].append(numbers.integers(0, 3, length) if count or draw(st.booleans()) else None)
    return extras


@st.composite
def sample_lists(
    draw: st.DrawFn,
    *,
    min_samples: int = 1,
    max_samples: int = 7,
    max_length: int = 6,
    carries: Collection[Carried] = (),
    wide: bool = False,
) -> SampleLists:
    """Samples with empty prompts, empty responses, one token, no loss at all, shared groups and units; every sample has a token.

    `carries` says what they may also have: expert routes ("router_replay"), images ("vision"); `wide` columns of k numbers per token.
    """
    count = draw(st.integers(min_samples, max_samples))
    ids = token_ids() if draw(st.booleans()) else st.integers(0, 300)
    prompts, responses = [], []
    for _ in range(count):
        actions = draw(st.integers(0, max_length))
        prompts.append(draw(st.lists(ids, min_size=int(actions == 0), max_size=max_length)))
        responses.append(draw(st.lists(ids, min_size=actions, max_size=actions)))
    weight = draw(st.sampled_from((st.integers(0, 1), st.just(0), weights())))
    names = draw(st.lists(st.sampled_from(COLUMN_NAMES), unique=True))

    def per_action(values: st.SearchStrategy[float]) -> list[list[float]]:
        return [draw(st.lists(values, min_size=len(response), max_size=len(response))) for response in responses]

    columns: dict[str, list[Any]] = {name: per_action(numbers()) for name in names}
    if wide and draw(st.booleans()):
        columns |= {name: _wide(draw, responses, values) for name, values in (("top_ids", ids), ("top_logprobs", numbers()))}
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    extras: dict[str, list[AnyArray | None]] = {}
    if "router_replay" in carries and count and draw(st.booleans()):
        extras[EXPERT_ROUTES] = draw(expert_routes(lengths))
    if "vision" in carries and count and draw(st.booleans()):
        extras |= draw(images(lengths))

    return SampleLists(
        prompts=prompts,
        responses=responses,
        loss_masks=per_action(weight),
        columns=columns,
        sample_ids=draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count, unique=True)),
        group_ids=draw(labels(count)),
        unit_ids=draw(labels(count)),
        extras=extras,
    )


def _wide(draw: st.DrawFn, responses: list[list[int]], values: st.SearchStrategy[Any]) -> list[list[list[Any]]]:
    """Draw k values, of one k, for every response token."""
    width = draw(st.integers(1, 3))
    entries = st.lists(values, min_size=width, max_size=width)
    return [[draw(entries) for _ in response] for response in responses]


def sample_columns(
    *,
    min_samples: int = 1,
    max_samples: int = 7,
    max_length: int = 6,
    carries: Collection[Carried] = (),
    wide: bool = False,
) -> st.SearchStrategy[SampleColumns]:
    """Return the same samples as columns."""
    lists = sample_lists(min_samples=min_samples, max_samples=max_samples, max_length=max_length, carries=carries, wide=wide)
    return lists.map(SampleLists.to_columns)


@st.composite
def sample_lengths(draw: st.DrawFn, *, max_samples: int = 7, max_length: int = 6) -> SampleLengths:
    """Draw the lengths of such samples, which are all that a planner sees."""
    count = draw(st.integers(1, max_samples))
    actions = [draw(st.integers(0, max_length)) for _ in range(count)]
    prompts = [draw(st.integers(int(of_response == 0), max_length)) for of_response in actions]
    sample_ids = draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count, unique=True))
    tokens = np.add(prompts, actions)
    group_ids, unit_ids = draw(labels(count)), draw(labels(count))
    as_array = partial(np.asarray, dtype=np.int64)
    return SampleLengths(tokens, as_array(actions), as_array(sample_ids), as_array(group_ids), as_array(unit_ids))


@st.composite
def common_prefixes(draw: st.DrawFn, lengths: SampleLengths) -> CommonPrefixes:
    """Draw an order of samples of these lengths, and what each has in common with the one before: nothing, some tokens, or all."""
    order = np.asarray(draw(st.permutations(range(len(lengths)))), dtype=np.int64)
    tokens = lengths.tokens[order].tolist()
    shared = [0]
    for before, own in pairwise(tokens):
        shared.append(draw(st.just(0) | st.integers(0, min(before, own)) | st.just(min(before, own))))
    return CommonPrefixes(order, np.asarray(shared, dtype=np.int64))


@st.composite
def with_prefixes(draw: st.DrawFn, columns: SampleColumns) -> SampleColumns:
    """Give some of these samples the first tokens of an earlier one: trees of any depth, some of samples that are equal."""
    ids, offsets = columns.input_ids.copy(), columns.token_offsets.tolist()
    for sample in range(1, len(columns)):
        begin, end = offsets[sample], offsets[sample + 1]
        source = offsets[draw(st.integers(0, sample - 1))]
        count = draw(st.just(0) | st.integers(0, end - begin))
        ids[begin : begin + count] = ids[source : source + count]
    return evolve(columns, input_ids=ids)


def labels(count: int) -> st.SearchStrategy[list[int]]:
    """Groups or units of so many samples: each on its own, in pairs, each with one far off, or any."""
    own, pairs = list(range(count)), [number // 2 for number in range(count)]
    apart = [number % max(count // 2, 1) for number in range(count)]
    return st.sampled_from((own, own, pairs, apart)) | st.lists(st.integers(0, max(count // 2, 1)), min_size=count, max_size=count)


@st.composite
def layouts(draw: st.DrawFn, lengths: SampleLengths, *, parallel: bool = True) -> Layout:
    """Layouts that these samples fit into: no group, unit or sample is larger than what must hold it.

    `parallel` also draws tensor, context and pipeline parallel sizes, for collators whose rows depend on them.
    """
    tp, cp, pp = (draw(st.sampled_from((1, 2, 4))) if parallel else 1 for _ in range(3))
    align = tp if cp == 1 else 2 * tp * cp  # what a packed row rounds each of its samples up to
    longest = -(-int(lengths.tokens.max(initial=1)) // align) * align
    rows = largest_bundle(lengths, groups=False)
    extra = st.integers(0, 3)
    cut = draw(st.sampled_from(("not at all", "by rows", "by tokens")))
    return Layout(
        dp=draw(st.integers(1, 4)),
        tp=tp,
        cp=cp,
        pp=pp,
        mini_batch_size=draw(st.none() | extra.map(lambda more: largest_bundle(lengths, groups=True) + more)),
        micro_batch_rows=rows + draw(extra) if cut == "by rows" else None,
        micro_batch_tokens=rows * longest + draw(st.integers(0, 2 * longest)) if cut == "by tokens" else None,
    )


def largest_bundle(lengths: SampleLengths, *, groups: bool) -> int:
    """Return the size of the largest set of samples that may not be cut: a unit, or with `groups` all that share groups or units."""
    owner = list(range(len(lengths)))

    def root(sample: int) -> int:
        while owner[sample] != sample:
            sample = owner[sample]
        return sample

    for ids in (lengths.unit_ids, lengths.group_ids) if groups else (lengths.unit_ids,):
        first: dict[int, int] = {}
        for sample, label in enumerate(ids.tolist()):
            owner[root(sample)] = root(first.setdefault(label, sample))
    roots = [root(sample) for sample in range(len(lengths))]
    return max((roots.count(sample) for sample in roots), default=1)
