"""Batches for losses and corrections: loss-carrying tokens of several sequences as a rollout leaves them, and ways to cut them.

Values are exact in float32; log-probabilities differ from token to token, so that nothing ties by accident.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.kinds.needs import DIVERGENCE, LOGPROBS_AT, ROLE_NEED, TOP_1_AGREEMENT, column_forms, model_score
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, offsets_of, segment_indices
from skyrl_engine.objective.samples import ScoredSamples

FloatArray = npt.NDArray[np.float32]
Range = Literal["ordinary", "extreme", "rounded"]
"""`extreme` reaches probability 1, probabilities near 0 and ratios of e^30; `rounded` holds what bfloat16 holds."""

_LOGPROBS = tuple(-each / 16 for each in (16, 8, 4, 24, 40, 64, 96))
_EXTREME_LOGPROBS = (-1.0, 0.0, -30.0, -88.0)
_DRIFTS = tuple(each / 16 for each in (0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16))
_EXTREME_DRIFTS = (0.0, 0.25, 3.0, -3.0, 12.0, -12.0, 30.0, -30.0)
_FAR_DRIFTS = (100.0, -100.0, 30.0, 0.0, -30.0)
_FAR_ADVANTAGES = (100.0, -100.0)
_ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 0.25, -2.0, 3.0, 0.0)
_NUMBERS = tuple(each / 8 for each in (8, -8, 4, -4, 2, 12, -20, 1, 0))
_WEIGHTS = (1.0, 0.5, 0.25, 2.0, 0.75)
_JITTER = 1 / 1024
_WIDE_SHARE = np.float32(2)
"""Nats that keep the probabilities of up to three tokens below 1 together."""
_PICKS = st.binary(min_size=1, max_size=12)
LONG = 150
"""By how much a long batch is longer."""


@frozen(eq=False)
class TokenBatch:
    """S sequences with n loss-carrying tokens, flat. `values` float32[n] by need, [n, k] of those that are wide; `weights` float64[n] as a
    reducer gives them.

    `lengths`, `sample_ids`, `group_ids` and `unit_ids` are int64[S]; a sequence without a token that carries loss has length 0.
    `roles` int64[S] tell chosen from rejected sequences where the needs ask for it; then units are pairs.
    """

    lengths: IntArray
    values: Mapping[str, AnyArray]
    weights: npt.NDArray[np.float64]
    sample_ids: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    roles: IntArray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def sequence_index(self) -> IntArray:
        """Return int64[n]: the sequence of every token."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def places(self, sequences: Sequence[int]) -> IntArray:
        """Return the positions of these sequences' tokens, in the order of the sequences."""
        return segment_indices(offsets_of(self.lengths), np.asarray(sequences, dtype=np.int64))

    def take(self, sequences: Sequence[int]) -> "TokenBatch":
        """Return the chosen sequences in the chosen order; weights stay those of the whole batch."""
        chosen = np.asarray(sequences, dtype=np.int64)
        places = self.places(sequences)
        return TokenBatch(
            self.lengths[chosen],
            {name: values[places] for name, values in self.values.items()},
            self.weights[places],
            self.sample_ids[chosen],
            self.group_ids[chosen],
            self.unit_ids[chosen],
            None if self.roles is None else self.roles[chosen],
        )

    def with_values(self, **values: AnyArray) -> "TokenBatch":
        return evolve(self, values={**self.values, **values})

    def drifted(self, nats: float) -> "TokenBatch | None":
        """Return the batch with the other policies' log-probabilities lowered; None where no need is one of them."""
        others = {name: values - np.float32(nats) for name, values in self.values.items() if name.endswith("_logprobs")}
        return self.with_values(**others) if others else None

    def micro_batch(self) -> MicroBatch:
        """Return the micro-batch that a backend gives to the objective, without the model's inputs."""
        import torch

        samples = ScoredSamples(
            sample_ids=self.sample_ids,
            group_ids=self.group_ids,
            unit_ids=self.unit_ids,
            action_lengths=self.lengths,
            scored=Ragged(
                np.concatenate([np.zeros(0, np.int32), *(np.arange(length, dtype=np.int32) for length in self.lengths)]),
                offsets_of(self.lengths),
            ),
            columns={name: values.copy() for name, values in self.values.items()},
            weights=self.weights,
            roles=self.roles,
        )
        nothing = torch.zeros(0, dtype=torch.int64)
        return MicroBatch({}, nothing, nothing, Ragged.from_list([], np.int64), samples)

    def __str__(self) -> str:
        shape = f"{len(self)} sequence{'' if len(self) == 1 else 's'} of {_listed(self.lengths)} loss-carrying tokens"
        paired = [f"units {_listed(self.unit_ids)}"] if len(np.unique(self.unit_ids)) < len(self) else []
        return "\n".join([shape, *paired, *(f"{name} {_listed(values.ravel())}" for name, values in self.values.items())])


_TOLD = 24
"""Numbers that a counterexample spells out."""


def _listed(values: Iterable[float]) -> str:
    numbers = [f"{value:g}" for value in values]
    more = [f"... ({len(numbers)} in all)"] if len(numbers) > _TOLD else []
    return ", ".join(numbers[:_TOLD] + more) or "none"


@frozen(eq=False)
class CutBatch:
    """A batch, and the sequences of each of its micro-batches."""

    batch: TokenBatch
    parts: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        cut = " | ".join(", ".join(map(str, part)) or "none" for part in self.parts)
        return f"{self.batch}\nmicro-batches of the sequences {cut}"


@frozen(eq=False)
class ReorderedBatch:
    """A batch, and another order of its sequences."""

    batch: TokenBatch
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.batch}\nin the order {_listed(self.order)}"


@frozen(eq=False)
class FilledBatch:
    """A batch, and the positions of its sequences among `total`; the other sequences have no token that carries loss."""

    batch: TokenBatch
    places: tuple[int, ...]
    total: int

    @property
    def filled(self) -> TokenBatch:
        """Return the batch with the other sequences in between."""
        count = len(self.batch)
        lengths = np.zeros(self.total, dtype=np.int64)
        lengths[list(self.places)] = self.batch.lengths
        ids = np.full((3, self.total), -1, dtype=np.int64)
        ids[:, list(self.places)] = (self.batch.sample_ids, self.batch.group_ids, self.batch.unit_ids)
        others = np.flatnonzero(ids[0] == -1)
        ids[:, others] = 1_000 + count + np.arange(len(others))
        roles = None
        if self.batch.roles is not None:
            roles = np.zeros(self.total, dtype=np.int64)
            roles[list(self.places)] = self.batch.roles
        return evolve(self.batch, lengths=lengths, sample_ids=ids[0], group_ids=ids[1], unit_ids=ids[2], roles=roles)

    def __str__(self) -> str:
        return f"{self.batch}\nwith {self.total - len(self.batch)} sequences more that have none"


@st.composite
def batches(
    draw: st.DrawFn,
    needs: Iterable[str],
    *,
    range_: Range = "ordinary",
    min_sequences: int = 1,
    max_sequences: int = 4,
    max_tokens: int = 3,
    empty: bool = False,
    units: bool = True,
    long: bool = False,
) -> TokenBatch:
    """Draw batches with every need of a loss or correction, and always log-probabilities. `empty` allows sequences without a token,
    `units` sequences that belong together, of which there are two to a unit then. `long` makes some batches `LONG` times as long: more
    tokens than fit a byte or another fixed size of a buffer. Who needs roles gets pairs, two of them or more where two sequences or more are
    asked for.
    """
    paired = in_pairs(needs)
    count = (
        2 * draw(st.integers(min_sequences, max(max_sequences // 2, min_sequences)))
        if paired
        else draw(st.integers(min_sequences, max_sequences))
    )
    pairs = paired or (units and count >= 4 and draw(st.booleans()))
    lengths = _picked(draw, count, range(0 if empty else 1, max_tokens + 1)).astype(np.int64)
    lengths *= draw(st.sampled_from((1, 1, 1, LONG))) if long else 1
    total = int(lengths.sum())
    weights = _picked(draw, total, _WEIGHTS)
    numbers = np.arange(count, dtype=np.int64)
    groups = numbers // 2 if draw(st.booleans()) else numbers
    return TokenBatch(
        lengths,
        _values(draw, dict.fromkeys(("logprobs", *needs)), total, range_) | _wide_values(draw, needs, total, range_),
        weights / max(weights.sum(), 1.0),
        numbers,
        groups,
        numbers // 2 if pairs else numbers,
        numbers % 2 if paired else None,
    )


def in_pairs(needs: Iterable[str]) -> bool:
    """Return True where the needs ask for roles: then every unit is a chosen and a rejected sequence."""
    return ROLE_NEED in needs


def _picked(draw: st.DrawFn, count: int, choices: Sequence[float]) -> npt.NDArray[np.float64]:
    """Draw float64[count] from the choices, the first of which is the simplest. A few picks repeat in turn, so that Hypothesis finds a single
    choice that breaks a promise. All picks are one draw of bytes, since a draw per number would take most of the time.
    """
    picks = np.frombuffer(draw(_PICKS), dtype=np.uint8)
    picked: npt.NDArray[np.float64] = np.asarray(choices, dtype=np.float64)[np.resize(picks, count) % len(choices)]
    return picked


def _values(draw: st.DrawFn, needs: Iterable[str], count: int, range_: Range) -> dict[str, AnyArray]:
    """Draw values by need: log-probabilities of other policies drift from the model's own, other needs have numbers of their own."""

    def column(choices: Sequence[float]) -> FloatArray:
        return _picked(draw, count, choices).astype(np.float32)

    extreme = range_ == "extreme"
    jitter = np.zeros(count, np.float32) if range_ == "rounded" else ((np.arange(count) * 37 % 64) * _JITTER).astype(np.float32)
    logprobs = column(_EXTREME_LOGPROBS if extreme else _LOGPROBS)
    logprobs = np.where(logprobs == 0, logprobs, logprobs - jitter).astype(np.float32)
    values: dict[str, AnyArray] = {}
    for name in needs:
        if is_wide(name):
            continue
        if name == "logprobs":
            values[name] = logprobs
        elif name.endswith("logprobs"):
            values[name] = np.minimum(logprobs - column(_EXTREME_DRIFTS if extreme else _DRIFTS), 0).astype(np.float32)
        elif name == "entropy":
            values[name] = (np.abs(column(_NUMBERS)) + jitter).astype(np.float32)
        elif name == "advantages":
            values[name] = column(_ADVANTAGES)
        elif name == "values":
            values[name] = column(_NUMBERS) + jitter
        elif name == "mean_logprob":
            values[name] = -np.abs(column(_NUMBERS)) - jitter - 1
        elif model_score(name) == DIVERGENCE:
            values[name] = np.abs(column(_NUMBERS)) + jitter
        elif name == TOP_1_AGREEMENT:
            values[name] = (column(_NUMBERS) > 0).astype(np.float32)
        else:
            values[name] = column(_NUMBERS)
    return values


def is_wide(need: str) -> bool:
    """Return True for a need of k numbers per token: `COLUMN[k]`, and `logprobs_at:COLUMN`, which needs the column of ids too."""
    score = model_score(need)
    return score == LOGPROBS_AT if score else "number" not in column_forms((need,)).values()


def _wide_values(draw: st.DrawFn, needs: Iterable[str], count: int, range_: Range) -> dict[str, AnyArray]:
    """Draw values [n, k] of the needs that are wide, one k for all: token ids, and log-probabilities of tokens that leave others a share."""
    wide = {name: form for name, form in column_forms(needs).items() if form != "number"}
    names = [*(need for need in needs if model_score(need) == LOGPROBS_AT), *wide]
    if not names:
        return {}
    width = draw(st.sampled_from((2, 3, 1)))
    values: dict[str, AnyArray] = {}
    for name in names:
        choices = _EXTREME_LOGPROBS if range_ == "extreme" else _LOGPROBS
        drawn: AnyArray
        if wide.get(name) == "token ids":
            drawn = _picked(draw, count * width, range(64)).astype(np.int64)
        elif "logprobs" in name:
            drawn = _picked(draw, count * width, choices).astype(np.float32) - _WIDE_SHARE
        else:
            drawn = _picked(draw, count * width, _NUMBERS).astype(np.float32)
        values[name] = drawn.reshape(count, width)
    return values


@st.composite
def cut_batches(draw: st.DrawFn, needs: Iterable[str], *, max_parts: int = 3) -> CutBatch:
    """Draw batches cut into two micro-batches or more, each with tokens; units stay whole."""
    batch = draw(batches(needs, min_sequences=2, long=True))
    units = np.unique(batch.unit_ids)
    parts = draw(st.integers(2, min(max_parts, len(units))))
    homes = _picked(draw, len(units), range(parts)).astype(np.int64).tolist()
    homes[:parts] = range(parts)
    home_of = dict(zip(units.tolist(), homes, strict=True))
    members = [tuple(i for i, unit in enumerate(batch.unit_ids.tolist()) if home_of[unit] == part) for part in range(parts)]
    return CutBatch(batch, tuple(members))


@st.composite
def reordered_batches(draw: st.DrawFn, needs: Iterable[str]) -> ReorderedBatch:
    """Draw batches with another order of their sequences; those of one unit keep their relative order, unless roles tell them apart."""
    batch = draw(batches(needs, min_sequences=2, long=True))
    units = np.unique(batch.unit_ids).tolist()
    turns = draw(st.permutations(units).filter(lambda turns: list(turns) != units) if len(units) > 1 else st.just(units))
    step = 1 if batch.roles is None else -1
    return ReorderedBatch(batch, tuple(int(i) for unit in turns for i in np.flatnonzero(batch.unit_ids == unit)[::step]))


@st.composite
def filled_batches(draw: st.DrawFn, needs: Iterable[str]) -> FilledBatch:
    """Draw batches with positions for sequences without a token that carries loss."""
    batch = draw(batches(needs, long=True))
    total = len(batch) + draw(st.integers(1, 2))
    places = draw(st.lists(st.integers(0, total - 1), min_size=len(batch), max_size=len(batch), unique=True))
    return FilledBatch(batch, tuple(sorted(places)), total)


@frozen(eq=False)
class WornBatch:
    """A cut batch, and the number of its micro-batches that a product has seen before."""

    cut: CutBatch
    calls: int

    def __str__(self) -> str:
        return f"{self.cut}" + (f"\nafter {self.calls} calls" if self.calls else "")


def worn_batches(needs: Iterable[str]) -> st.SearchStrategy[WornBatch]:
    """Draw cut batches for products that are new, and for products that were called often."""
    return st.builds(WornBatch, cut_batches(needs), st.sampled_from((0, 0, 0, 64)))


@frozen(eq=False)
class RelabelledBatch:
    """A batch, and other names of its groups and units."""

    batch: TokenBatch
    names: IntArray

    @property
    def relabelled(self) -> TokenBatch:
        batch = self.batch
        return evolve(batch, group_ids=self.names[batch.group_ids], unit_ids=self.names[batch.unit_ids])

    def __str__(self) -> str:
        return f"{self.batch}\nwith the groups named {_listed(self.relabelled.group_ids)}"


@st.composite
def relabelled_batches(draw: st.DrawFn, needs: Iterable[str]) -> RelabelledBatch:
    """Draw batches with other names of their groups and units: any integers, in any order."""
    batch = draw(batches(needs))
    names = st.sampled_from((40, 7, 1_000_003, 0, 1, -5, 2**40, 2))
    chosen = draw(st.lists(names, min_size=len(batch), max_size=len(batch), unique=True))
    return RelabelledBatch(batch, np.asarray(chosen, dtype=np.int64))


CLOSE_IDS = 2**53
"""Ids from here on are closer than float64 tells apart, and too large to be places in any array."""


def in_threes(needs: Iterable[str], *, empty: bool = True) -> TokenBatch:
    """Return nine sequences in units of three and groups of six, as no random batch holds them. `empty`: a unit has an empty member.

    Who needs roles gets six sequences in units of two and groups of four.
    """
    size = _unit_size(needs)
    numbers = np.arange(3 * size, dtype=np.int64)
    lengths = np.array([2, 1, 3, 2, 0 if empty else 2, 1, 1, 2, 1], dtype=np.int64)[: len(numbers)]
    batch = varied(needs, sequences=1, tokens=int(lengths.sum()))
    roles = numbers % 2 if in_pairs(needs) else None
    return evolve(
        batch, lengths=lengths, sample_ids=numbers, group_ids=numbers // (2 * size), unit_ids=numbers // size, roles=roles
    )


def _unit_size(needs: Iterable[str]) -> int:
    return 2 if in_pairs(needs) else 3


def far(needs: Iterable[str]) -> TokenBatch:
    """Return a batch in which other policies are 100 nats away, either way, and advantages are as large as 100."""
    batch = varied(needs, sequences=2, tokens=5)
    logprobs = np.tile(np.array([-120.0, -1.0, -101.0, -0.5, -31.0], np.float32), 2)
    values = dict(batch.values)
    drifts = np.array([*_FAR_DRIFTS, *(-abs(drift) for drift in _FAR_DRIFTS)], np.float32)
    for name, given in batch.values.items():
        if name == "logprobs":
            values[name] = logprobs
        elif name.endswith("logprobs") and given.ndim == 1:
            values[name] = np.minimum(logprobs + drifts, 0)
            drifts = np.roll(drifts, 1)  # two other policies are far from each other too
        elif name == "advantages":
            values[name] = np.resize(np.asarray(_FAR_ADVANTAGES, np.float32), 10)
    return evolve(batch, values=values)


def certain(needs: Iterable[str]) -> list[TokenBatch]:
    """Return a batch in which the k tokens of the model, of another policy, and of both have all of the probability; none where no need is
    such log-probabilities.
    """
    batch = varied(needs, sequences=2, tokens=2)
    values = dict(batch.values)
    wide = [name for name, given in batch.values.items() if given.ndim == 2 and "logprobs" in name]
    for place, name in enumerate(wide):
        whole = np.arange(batch.tokens) % (len(wide) + 1) != place
        values[name] = np.where(whole[:, None], np.array([0.0, -30.0], np.float32), batch.values[name]).astype(np.float32)
    return [evolve(batch, values=values)] if wide else []


MANY = 64


def many(needs: Iterable[str]) -> TokenBatch:
    """Return `MANY` sequences of 2,000 tokens together, in units of four and groups of eight; in pairs for who needs roles."""
    numbers = np.arange(MANY, dtype=np.int64)
    lengths = 1 + numbers * 37 % 60
    lengths[-1] += 2_000 - lengths.sum()
    batch = varied(needs, sequences=1, tokens=2_000)
    paired = in_pairs(needs)
    units = numbers // (2 if paired else 4)
    roles = numbers % 2 if paired else None
    return evolve(batch, lengths=lengths, sample_ids=numbers, group_ids=numbers // 8, unit_ids=units, roles=roles)


def cut_many(needs: Iterable[str]) -> CutBatch:
    """Return many sequences, of which those of the first group are a micro-batch of their own."""
    return CutBatch(many(needs), (tuple(range(8)), tuple(range(8, MANY))))


def cut_apart(needs: Iterable[str]) -> CutBatch:
    """Return four sequences cut in two, of which the first two are 8 nats away from other policies, either way: beyond all that is drawn."""
    batch = varied(needs, sequences=4, tokens=3)
    first = np.arange(6)
    values = dict(batch.values)
    values["logprobs"] = values["logprobs"].copy()
    values["logprobs"][first] -= 10
    others = [name for name, given in batch.values.items() if name != "logprobs" and name.endswith("logprobs") and given.ndim == 1]
    for place, name in enumerate(others):  # which are far from each other too
        values[name] = batch.values[name].copy()
        values[name][first] = values["logprobs"][first] + np.where((first + place) % 2, np.float32(8), np.float32(-8))
    return CutBatch(evolve(batch, values=values), ((0, 1), (2, 3)))


def cut_in_threes(needs: Iterable[str]) -> list[CutBatch]:
    """Return nine sequences in units of three: cut by units, and a unit with an empty member alone."""
    batch = in_threes(needs)
    one, two, three = _units(needs)
    return [CutBatch(batch, (one, two, three)), CutBatch(batch, (two, (*one, *three)))]


def _units(needs: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the sequences of each unit of `in_threes`."""
    size = _unit_size(needs)
    return [tuple(range(first, first + size)) for first in range(0, 3 * size, size)]


def reordered_threes(needs: Iterable[str]) -> list[ReorderedBatch]:
    """Return nine sequences in units of three whose last unit comes first."""
    one, two, three = _units(needs)
    return [ReorderedBatch(in_threes(needs), (*three, *one, *two))]


def filled_threes(needs: Iterable[str]) -> list[FilledBatch]:
    """Return nine sequences in units of three between two that have no token."""
    batch = in_threes(needs)
    return [FilledBatch(batch, tuple(range(1, len(batch) + 1)), len(batch) + 2)]


def relabelled_closely(needs: Iterable[str]) -> list[RelabelledBatch]:
    """Return batches whose groups and units get names that no float or no 32 bits tell apart, and that do not rise."""
    order = np.array([1, 0, 2, 5, 4, 3, 8, 7, 6], dtype=np.int64)
    return [RelabelledBatch(in_threes(needs), names) for names in (CLOSE_IDS + order, 5 + 2**32 * order)]


def fillers(batch: TokenBatch) -> list[TokenBatch]:
    """Return the micro-batches without a token that fill up ranks beside this batch: without a sequence, and with one that has no token."""
    nothing = evolve(batch.take(()), lengths=np.zeros(0, np.int64))
    ids = np.full(1, 1_000, np.int64)
    roles = None if batch.roles is None else np.zeros(1, np.int64)
    return [nothing, evolve(nothing, lengths=np.zeros(1, np.int64), sample_ids=ids, group_ids=ids, unit_ids=ids, roles=roles)]


def varied(needs: Iterable[str], *, sequences: int = 6, tokens: int = 4) -> TokenBatch:
    """Return the one batch in which a loss must find something to learn: it combines every choice of the ordinary batches."""
    count = sequences * tokens
    numbers = np.arange(sequences, dtype=np.int64)
    picks = np.arange(count)
    values: dict[str, AnyArray] = {}
    for place, name in enumerate(dict.fromkeys(("logprobs", *needs))):
        if is_wide(name):
            continue
        choices = {"logprobs": _LOGPROBS, "advantages": _ADVANTAGES}.get(name, _DRIFTS if name.endswith("logprobs") else _NUMBERS)
        values[name] = np.asarray(choices, dtype=np.float32)[(picks * (2 * place + 3) + place) % len(choices)]
    for name, drift in values.items():
        if name != "logprobs" and name.endswith("logprobs"):
            values[name] = np.minimum(values["logprobs"] - drift, 0).astype(np.float32)
    values |= _wide_varied(needs, count)
    return TokenBatch(
        np.full(sequences, tokens, np.int64),
        values,
        np.full(count, 1 / count),
        numbers,
        numbers // 2,
        numbers // 2,
        numbers % 2 if in_pairs(needs) else None,
    )


def _wide_varied(needs: Iterable[str], count: int, width: int = 2) -> dict[str, AnyArray]:
    """Return values [count, width] of the needs that are wide, every token's others than its neighbour's."""
    forms = {name: form for name, form in column_forms(needs).items() if form != "number"}
    names = [*(need for need in needs if model_score(need) == LOGPROBS_AT), *forms]
    picks = np.arange(count * width).reshape(count, width)
    logprobs = -2 - (picks % 7).astype(np.float32) / 4
    return {name: picks if forms.get(name) == "token ids" else logprobs - np.float32(place / 8) for place, name in enumerate(names)}


def one_token(needs: Iterable[str]) -> TokenBatch:
    """Return one sequence of one token, or a pair of such, which every loss or correction must accept."""
    count = 2 if in_pairs(needs) else 1
    values: dict[str, AnyArray] = {
        name: np.full(count, -1.0, np.float32) for name in dict.fromkeys(("logprobs", *needs)) if not is_wide(name)
    }
    values |= _wide_varied(needs, count)
    numbers = np.arange(count, dtype=np.int64)
    nothing = np.zeros(count, np.int64)
    roles = numbers if count == 2 else None
    return TokenBatch(np.ones(count, np.int64), values, np.full(count, 1 / count), numbers, nothing, nothing, roles)


@st.composite
def masked_batches(draw: st.DrawFn, needs: Iterable[str]) -> TokenBatch:
    """Draw micro-batches without any token that carries loss, and without any sequence."""
    batch = draw(batches(needs))
    keep = draw(st.integers(0, len(batch)))
    lengths = np.zeros(keep, dtype=np.int64)
    values = {name: values[:0] for name, values in batch.values.items()}
    roles = None if batch.roles is None else batch.roles[:keep]
    return TokenBatch(
        lengths, values, batch.weights[:0], batch.sample_ids[:keep], batch.group_ids[:keep], batch.unit_ids[:keep], roles
    )
