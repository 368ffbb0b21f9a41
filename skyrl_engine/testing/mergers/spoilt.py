"""Splits that no merger may accept: samples of any rank missing, returned twice, or never planned."""

from collections.abc import Collection

import numpy as np
from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.testing.mergers.splits import Split, splits

Place = tuple[int, int]
"""The number of an output, and a sample's place in it."""


@frozen(eq=False)
class SpoiltSplit:
    """A split, and other outputs of its ranks, of which something is wrong: `what`, in words that follow "where"."""

    split: Split
    outputs: tuple[RankOutput, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.split}\nbut {self.what}"


@st.composite
def draw_with_missing(draw: st.DrawFn, *, dp: int, mini_batches: int) -> SpoiltSplit:
    """Draw splits with a sample missing, or two, or one missing and another twice in its place."""
    split = draw(splits(dp=dp, mini_batches=mini_batches))
    places = _places(split)
    lost = draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True))
    left = [place for place in places if place not in lost]
    outputs = _drop_samples(split.outputs, lost)
    in_its_stead = draw(st.booleans())
    if not left or not in_its_stead:
        return SpoiltSplit(split, outputs, _describe_missing(split, lost))
    twice = draw(st.sampled_from(left))
    returned = _append_sample(outputs, twice[0], _take_sample(split, twice))
    return SpoiltSplit(split, returned, f"{_describe_missing(split, lost)} and sample {_id(split, twice)} comes twice")


@st.composite
def draw_with_doubled(draw: st.DrawFn, *, dp: int, mini_batches: int) -> SpoiltSplit:
    """Draw splits with a sample that comes twice, from its own rank or from another as well."""
    split = draw(splits(dp=dp, mini_batches=mini_batches))
    place, target = draw(st.sampled_from(_places(split))), draw(st.integers(0, len(split.outputs) - 1))
    return SpoiltSplit(
        split, _append_sample(split.outputs, target, _take_sample(split, place)), f"sample {_id(split, place)} comes twice"
    )


@st.composite
def draw_with_unexpected(draw: st.DrawFn, *, dp: int, mini_batches: int) -> SpoiltSplit:
    """Draw splits with a sample more, which was never planned."""
    split = draw(splits(dp=dp, mini_batches=mini_batches))
    place, target = draw(st.sampled_from(_places(split))), draw(st.integers(0, len(split.outputs) - 1))
    unplanned = next(sample_id for sample_id in (1_000, 1_001, *range(2_000, 2_100)) if sample_id not in split.whole.sample_ids)
    stranger = evolve(_take_sample(split, place), sample_ids=np.array([unplanned], np.int64))
    outputs = _append_sample(split.outputs, target, stranger)
    return SpoiltSplit(split, outputs, f"sample {unplanned}, which was never planned, is returned")


def _places(split: Split) -> list[Place]:
    return [(number, place) for number, output in enumerate(split.outputs) for place in range(len(output.sample_ids))]


def _id(split: Split, place: Place) -> int:
    return int(split.outputs[place[0]].sample_ids[place[1]])


def _take_sample(split: Split, place: Place) -> RankOutput:
    """Return one sample as an output of its own, without metrics."""
    return evolve(split.outputs[place[0]].take([place[1]]), metrics={})


def _describe_missing(split: Split, lost: Collection[Place]) -> str:
    ids = " and ".join(str(_id(split, place)) for place in sorted(lost))
    return f"sample {ids} is missing" if len(lost) == 1 else f"samples {ids} are missing"


def _drop_samples(outputs: tuple[RankOutput, ...], lost: Collection[Place]) -> tuple[RankOutput, ...]:
    return tuple(
        output.take([place for place in range(len(output.sample_ids)) if (number, place) not in lost])
        for number, output in enumerate(outputs)
    )


def _append_sample(outputs: tuple[RankOutput, ...], target: int, more: RankOutput) -> tuple[RankOutput, ...]:
    """Return the outputs with a sample more at the end of one of them."""
    changed = RankOutput.concat([outputs[target], more], outputs[target].coords)
    return (*outputs[:target], changed, *outputs[target + 1 :])
