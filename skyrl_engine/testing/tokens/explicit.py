"""Explicit batches for losses and corrections: those that hardly any draw holds."""

from collections.abc import Iterable

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT, column_forms, model_score
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.testing.tokens.rollouts import ADVANTAGES, DRIFTS, LOGPROBS, NUMBERS, has_pairs, is_wide
from skyrl_engine.testing.tokens.token_batches import CutBatch, FilledBatch, RelabelledBatch, ReorderedBatch, TokenBatch, WornBatch

_FAR_DRIFTS = (100.0, -100.0, 30.0, 0.0, -30.0)
_FAR_ADVANTAGES = (100.0, -100.0)
CLOSE_IDS = 2**53
"""Ids from here on are closer than float64 can tell apart, and too large to be places in any array."""


def make_threes(needs: Iterable[str], *, empty: bool = True) -> TokenBatch:
    """Return nine sequences in units of three and groups of six, as no random batch holds them. `empty`: a unit has an empty member.

    Who needs roles gets six sequences in units of two and groups of four.
    """
    size = _unit_size(needs)
    numbers = np.arange(3 * size, dtype=np.int64)
    lengths = np.array([2, 1, 3, 2, 0 if empty else 2, 1, 1, 2, 1], dtype=np.int64)[: len(numbers)]
    batch = make_varied_batch(needs, sequences=1, tokens=int(lengths.sum()))
    roles = numbers % 2 if has_pairs(needs) else None
    return evolve(
        batch, lengths=lengths, sample_ids=numbers, group_ids=numbers // (2 * size), unit_ids=numbers // size, roles=roles
    )


def _unit_size(needs: Iterable[str]) -> int:
    return 2 if has_pairs(needs) else 3


def make_far(needs: Iterable[str]) -> TokenBatch:
    """Return a batch in which other policies are 100 nats away, either way, and advantages are as large as 100."""
    batch = make_varied_batch(needs, sequences=2, tokens=5)
    logprobs = np.tile(np.array([-120.0, -1.0, -101.0, -0.5, -31.0], np.float32), 2)
    values = dict(batch.values)
    drifts = np.array([*_FAR_DRIFTS, *(-abs(drift) for drift in _FAR_DRIFTS)], np.float32)
    for name, column in batch.values.items():
        if name == "logprobs":
            values[name] = logprobs
        elif name.endswith("logprobs") and column.ndim == 1:
            values[name] = np.minimum(logprobs + drifts, 0)
            drifts = np.roll(drifts, 1)  # two other policies are far from each other too
        elif name == "advantages":
            values[name] = np.resize(np.asarray(_FAR_ADVANTAGES, np.float32), 10)
    return evolve(batch, values=values)


def list_certain(needs: Iterable[str]) -> list[TokenBatch]:
    """Return a batch in which the k tokens of the model, of another policy, and of both have all of the probability; none where no need is
    such log-probabilities.
    """
    batch = make_varied_batch(needs, sequences=2, tokens=2)
    values = dict(batch.values)
    wide = [name for name, column in batch.values.items() if column.ndim == 2 and "logprobs" in name]
    for place, name in enumerate(wide):
        whole = np.arange(batch.tokens) % (len(wide) + 1) != place
        values[name] = np.where(whole[:, None], np.array([0.0, -30.0], np.float32), batch.values[name]).astype(np.float32)
    return [evolve(batch, values=values)] if wide else []


MANY = 136
"""Sequences in two groups, each larger than 64."""


def make_many(needs: Iterable[str]) -> TokenBatch:
    """Return `MANY` sequences of 4,000 tokens together, in units of four and two groups; in pairs for who needs roles."""
    numbers = np.arange(MANY, dtype=np.int64)
    lengths = 1 + numbers * 37 % 60
    lengths[-1] = max(1, 4_000 - lengths[:-1].sum())
    batch = make_varied_batch(needs, sequences=1, tokens=int(lengths.sum()))
    paired = has_pairs(needs)
    units = numbers // (2 if paired else 4)
    roles = numbers % 2 if paired else None
    return evolve(batch, lengths=lengths, sample_ids=numbers, group_ids=numbers // (MANY // 2), unit_ids=units, roles=roles)


def cut_many(needs: Iterable[str]) -> CutBatch:
    """Return many sequences, of which those of the first group are a micro-batch of their own."""
    return CutBatch(make_many(needs), (tuple(range(MANY // 2)), tuple(range(MANY // 2, MANY))))


WIDE = 65


def list_wide(needs: Iterable[str]) -> list[TokenBatch]:
    """Return a batch of `WIDE` candidates per token, more than a word of 64 bits counts; none where no need is of several."""
    batch = make_varied_batch(needs, sequences=2, tokens=3)
    wide = _vary_wide_needs(needs, batch.tokens, WIDE)
    return [batch.with_values(**wide)] if wide else []


def cut_apart(needs: Iterable[str]) -> CutBatch:
    """Return four sequences cut in two, of which the first two are 8 nats away from other policies, either way: beyond all that is drawn."""
    batch = make_varied_batch(needs, sequences=4, tokens=3)
    first = np.arange(6)
    values = dict(batch.values)
    values["logprobs"] = values["logprobs"].copy()
    values["logprobs"][first] -= 10
    others = [
        name for name, column in batch.values.items() if name != "logprobs" and name.endswith("logprobs") and column.ndim == 1
    ]
    for place, name in enumerate(others):  # which are far from each other too
        values[name] = batch.values[name].copy()
        values[name][first] = values["logprobs"][first] + np.where((first + place) % 2, np.float32(8), np.float32(-8))
    return CutBatch(evolve(batch, values=values), ((0, 1), (2, 3)))


def cut_in_threes(needs: Iterable[str]) -> list[CutBatch]:
    """Return nine sequences in units of three: cut by units, and a unit with an empty member alone."""
    batch = make_threes(needs)
    one, two, three = _units(needs)
    return [CutBatch(batch, (one, two, three)), CutBatch(batch, (two, (*one, *three)))]


OFTEN = 64
"""Calls after which a product has no excuse to be young."""


def list_worn(needs: Iterable[str]) -> list[WornBatch]:
    """Return nine sequences cut by units of three, for a product that was called `OFTEN` times before."""
    return [WornBatch(cut_in_threes(needs)[0], OFTEN)]


def _units(needs: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the sequences of each unit of `make_threes`."""
    size = _unit_size(needs)
    return [tuple(range(first, first + size)) for first in range(0, 3 * size, size)]


def list_reordered_threes(needs: Iterable[str]) -> list[ReorderedBatch]:
    """Return nine sequences in units of three whose last unit comes first."""
    one, two, three = _units(needs)
    return [ReorderedBatch(make_threes(needs), (*three, *one, *two))]


def list_filled_threes(needs: Iterable[str]) -> list[FilledBatch]:
    """Return nine sequences in units of three between two that have no token."""
    batch = make_threes(needs)
    return [FilledBatch(batch, tuple(range(1, len(batch) + 1)), len(batch) + 2)]


def list_closely_relabelled(needs: Iterable[str]) -> list[RelabelledBatch]:
    """Return batches whose groups and units get names that no float or no 32 bits can tell apart, and that do not rise."""
    order = np.array([1, 0, 2, 5, 4, 3, 8, 7, 6], dtype=np.int64)
    return [RelabelledBatch(make_threes(needs), names) for names in (CLOSE_IDS + order, 5 + 2**32 * order)]


def fillers(batch: TokenBatch) -> list[TokenBatch]:
    """Return the micro-batches without a token that fill up ranks next to this batch: without a sequence, and with one that has no token."""
    nothing = evolve(batch.take(()), lengths=np.zeros(0, np.int64))
    ids = np.full(1, 1_000, np.int64)
    roles = None if batch.roles is None else np.zeros(1, np.int64)
    return [nothing, evolve(nothing, lengths=np.zeros(1, np.int64), sample_ids=ids, group_ids=ids, unit_ids=ids, roles=roles)]


def make_varied_batch(needs: Iterable[str], *, sequences: int = 6, tokens: int = 4) -> TokenBatch:
    """Return the one batch in which a loss must find something to learn: it combines every choice of the ordinary batches."""
    count = sequences * tokens
    numbers = np.arange(sequences, dtype=np.int64)
    picks = np.arange(count)
    values: dict[str, AnyArray] = {}
    for place, name in enumerate(dict.fromkeys(("logprobs", *needs))):
        if is_wide(name):
            continue
        choices = {"logprobs": LOGPROBS, "advantages": ADVANTAGES}.get(name, DRIFTS if name.endswith("logprobs") else NUMBERS)
        values[name] = np.asarray(choices, dtype=np.float32)[(picks * (2 * place + 3) + place) % len(choices)]
    for name, drift in values.items():
        if name != "logprobs" and name.endswith("logprobs"):
            values[name] = np.minimum(values["logprobs"] - drift, 0).astype(np.float32)
    values |= _vary_wide_needs(needs, count)
    return TokenBatch(
        np.full(sequences, tokens, np.int64),
        values,
        np.full(count, 1 / count),
        numbers,
        numbers // 2,
        numbers // 2,
        numbers % 2 if has_pairs(needs) else None,
    )


def _vary_wide_needs(needs: Iterable[str], count: int, width: int = 2) -> dict[str, AnyArray]:
    """Return values [count, width] of the needs that are wide, every token's others than its neighbour's."""
    forms = {name: form for name, form in column_forms(needs).items() if form != "number"}
    names = [*(need for need in needs if model_score(need) == LOGPROBS_AT), *forms]
    picks = np.arange(count * width).reshape(count, width)
    logprobs = -2 - np.float32(np.log(width / 2)) - (picks % 7).astype(np.float32) / 4
    return {name: picks if forms.get(name) == "token ids" else logprobs - np.float32(place / 8) for place, name in enumerate(names)}


def one_token(needs: Iterable[str]) -> TokenBatch:
    """Return one sequence of one token, or a pair of such, which every loss or correction must accept."""
    count = 2 if has_pairs(needs) else 1
    values: dict[str, AnyArray] = {
        name: np.full(count, -1.0, np.float32) for name in dict.fromkeys(("logprobs", *needs)) if not is_wide(name)
    }
    values |= _vary_wide_needs(needs, count)
    numbers = np.arange(count, dtype=np.int64)
    nothing = np.zeros(count, np.int64)
    roles = numbers if count == 2 else None
    return TokenBatch(np.ones(count, np.int64), values, np.full(count, 1 / count), numbers, nothing, nothing, roles)
