"""Batches for losses and corrections as Hypothesis draws them: loss-carrying tokens of several sequences as a rollout leaves them, and ways to
cut them.

Values are exact in float32; log-probabilities differ from token to token, so that nothing ties by accident.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.needs import DIVERGENCE, LOGPROBS_AT, ROLE_NEED, TOP_1_AGREEMENT, column_forms, model_score
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.testing.tokens.token_batches import CutBatch, FilledBatch, RelabelledBatch, ReorderedBatch, TokenBatch, WornBatch

FloatArray = npt.NDArray[np.float32]
Range = Literal["ordinary", "extreme", "rounded"]
"""`extreme` reaches probability 1, probabilities near 0 and ratios of e^30; `rounded` holds what bfloat16 holds."""
LOGPROBS = tuple(-number / 16 for number in (16, 8, 4, 24, 40, 64, 96))
_EXTREME_LOGPROBS = (-1.0, 0.0, -30.0, -88.0)
DRIFTS = tuple(number / 16 for number in (0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16))
_EXTREME_DRIFTS = (0.0, 0.25, 3.0, -3.0, 12.0, -12.0, 30.0, -30.0)
ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 0.25, -2.0, 3.0, 0.0)
NUMBERS = tuple(number / 8 for number in (8, -8, 4, -4, 2, 12, -20, 1, 0))
_WEIGHTS = (1.0, 0.5, 0.25, 2.0, 0.75)
_JITTER = 1 / 1024
_WIDE_SHARE = np.float32(2)
"""Nats that keep the probabilities of up to three tokens below 1 together."""
_PICKS = st.binary(min_size=1, max_size=12)
LONG = 150
"""By how much a long batch is longer."""


@st.composite
def draw_batches(
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
    paired = has_pairs(needs)
    count = (
        2 * draw(st.integers(min_sequences, max(max_sequences // 2, min_sequences)))
        if paired
        else draw(st.integers(min_sequences, max_sequences))
    )
    pairs = paired or (units and count >= 4 and draw(st.booleans()))
    lengths = _pick(draw, count, range(0 if empty else 1, max_tokens + 1)).astype(np.int64)
    lengths *= draw(st.sampled_from((1, 1, 1, LONG))) if long else 1
    total = int(lengths.sum())
    weights = _pick(draw, total, _WEIGHTS)
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


def has_pairs(needs: Iterable[str]) -> bool:
    """Return True where the needs ask for roles: then every unit is a chosen and a rejected sequence."""
    return ROLE_NEED in needs


def _pick(draw: st.DrawFn, count: int, choices: Sequence[float]) -> npt.NDArray[np.float64]:
    """Draw float64[count] from the choices, the first of which is the simplest. A few picks repeat in turn, so that Hypothesis finds a single
    choice that breaks a promise. All picks are one draw of bytes, since a draw per number would take most of the time.
    """
    picks = np.frombuffer(draw(_PICKS), dtype=np.uint8)
    picked: npt.NDArray[np.float64] = np.asarray(choices, dtype=np.float64)[np.resize(picks, count) % len(choices)]
    return picked


def _values(draw: st.DrawFn, needs: Iterable[str], count: int, range_: Range) -> dict[str, AnyArray]:
    """Draw values by need: log-probabilities of other policies drift from the model's own, other needs have numbers of their own."""

    def column(choices: Sequence[float]) -> FloatArray:
        return _pick(draw, count, choices).astype(np.float32)

    extreme = range_ == "extreme"
    jitter = np.zeros(count, np.float32) if range_ == "rounded" else ((np.arange(count) * 37 % 64) * _JITTER).astype(np.float32)
    logprobs = column(_EXTREME_LOGPROBS if extreme else LOGPROBS)
    logprobs = np.where(logprobs == 0, logprobs, logprobs - jitter).astype(np.float32)
    values: dict[str, AnyArray] = {}
    for name in needs:
        if is_wide(name):
            continue
        if name == "logprobs":
            values[name] = logprobs
        elif name.endswith("logprobs"):
            values[name] = np.minimum(logprobs - column(_EXTREME_DRIFTS if extreme else DRIFTS), 0).astype(np.float32)
        elif name == "entropy":
            values[name] = (np.abs(column(NUMBERS)) + jitter).astype(np.float32)
        elif name == "advantages":
            values[name] = column(ADVANTAGES)
        elif name == "values":
            values[name] = column(NUMBERS) + jitter
        elif name in ("mean_logprob", "log_sum_squares"):
            values[name] = -np.abs(column(NUMBERS)) - jitter - 1
        elif model_score(name) == DIVERGENCE:
            values[name] = np.abs(column(NUMBERS)) + jitter
        elif name == TOP_1_AGREEMENT:
            values[name] = (column(NUMBERS) > 0).astype(np.float32)
        else:
            values[name] = column(NUMBERS)
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
        choices = _EXTREME_LOGPROBS if range_ == "extreme" else LOGPROBS
        drawn: AnyArray
        if wide.get(name) == "token ids":
            drawn = _pick(draw, count * width, range(64)).astype(np.int64)
        elif "logprobs" in name:
            drawn = _pick(draw, count * width, choices).astype(np.float32) - _WIDE_SHARE
        else:
            drawn = _pick(draw, count * width, NUMBERS).astype(np.float32)
        values[name] = drawn.reshape(count, width)
    return values


@st.composite
def draw_cut_batches(draw: st.DrawFn, needs: Iterable[str], *, max_parts: int = 3) -> CutBatch:
    """Draw batches cut into two micro-batches or more, each with tokens; units stay whole."""
    batch = draw(draw_batches(needs, min_sequences=2, long=True))
    units = np.unique(batch.unit_ids)
    parts = draw(st.integers(2, min(max_parts, len(units))))
    homes = _pick(draw, len(units), range(parts)).astype(np.int64).tolist()
    homes[:parts] = range(parts)
    home_of = dict(zip(units.tolist(), homes, strict=True))
    members = [tuple(i for i, unit in enumerate(batch.unit_ids.tolist()) if home_of[unit] == part) for part in range(parts)]
    return CutBatch(batch, tuple(members))


@st.composite
def draw_reordered_batches(draw: st.DrawFn, needs: Iterable[str]) -> ReorderedBatch:
    """Draw batches with another order of their sequences; those of one unit keep their relative order, unless roles tell them apart."""
    batch = draw(draw_batches(needs, min_sequences=2, long=True))
    units = np.unique(batch.unit_ids).tolist()
    turns = draw(st.permutations(units).filter(lambda turns: list(turns) != units) if len(units) > 1 else st.just(units))
    step = 1 if batch.roles is None else -1
    return ReorderedBatch(batch, tuple(int(i) for unit in turns for i in np.flatnonzero(batch.unit_ids == unit)[::step]))


@st.composite
def draw_filled_batches(draw: st.DrawFn, needs: Iterable[str]) -> FilledBatch:
    """Draw batches with positions for sequences without a token that carries loss."""
    batch = draw(draw_batches(needs, long=True))
    total = len(batch) + draw(st.integers(1, 2))
    places = draw(st.lists(st.integers(0, total - 1), min_size=len(batch), max_size=len(batch), unique=True))
    return FilledBatch(batch, tuple(sorted(places)), total)


def draw_worn_batches(needs: Iterable[str]) -> st.SearchStrategy[WornBatch]:
    """Draw cut batches for products that are new, and for products that were called a few times."""
    return st.builds(WornBatch, draw_cut_batches(needs), st.sampled_from((0, 0, 0, 9)))


@st.composite
def draw_relabelled_batches(draw: st.DrawFn, needs: Iterable[str]) -> RelabelledBatch:
    """Draw batches with other names of their groups and units: any integers, in any order."""
    batch = draw(draw_batches(needs))
    names = st.sampled_from((40, 7, 1_000_003, 0, 1, -5, 2**40, 2))
    chosen = draw(st.lists(names, min_size=len(batch), max_size=len(batch), unique=True))
    return RelabelledBatch(batch, np.asarray(chosen, dtype=np.int64))


@st.composite
def draw_masked_batches(draw: st.DrawFn, needs: Iterable[str]) -> TokenBatch:
    """Draw micro-batches without any token that carries loss, and without any sequence."""
    batch = draw(draw_batches(needs))
    keep = draw(st.integers(0, len(batch)))
    lengths = np.zeros(keep, dtype=np.int64)
    values = {name: values[:0] for name, values in batch.values.items()}
    roles = None if batch.roles is None else batch.roles[:keep]
    return TokenBatch(
        lengths, values, batch.weights[:0], batch.sample_ids[:keep], batch.group_ids[:keep], batch.unit_ids[:keep], roles
    )
