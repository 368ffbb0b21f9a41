"""Samples and attempts as text whose tokens are shaded: by loss weight, or by advantage and by the gap between sampler and trainer."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from attrs import field, frozen

from skyrl_engine.contracts.values.rollout import SEGMENT_SAMPLED, Trajectory
from skyrl_engine.report.run_facts import RunFacts
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.checking import read_listing
from skyrl_engine.rollout.exported import segments_of
from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.rollout.moments import PlacedAttempt, choose_by_rank, list_moments
from skyrl_engine.rollout.texts import decoder_of
from skyrl_engine.run.kept_samples import KeptSample, read_samples
from skyrl_engine.visible import visible

SHOWN = 800
"""Tokens of a sample or an attempt that are shown."""

Decode = Callable[[Sequence[int]], str]


@frozen
class ShadedText:
    """Text of tokens that are shaded alike. `kind` names the style, `strength` from 0 to 1 how strongly, `gap` from 0 to 3 how far the sampler
    was from the trainer; `tells` is what a pointer over it says.
    """

    text: str
    kind: str = "plain"
    strength: float = 0.0
    gap: int = 0
    tells: str = ""


@frozen
class Passage:
    """A sample, half of a pair, or an attempt: its heading, facts about it, and its pieces."""

    heading: str
    facts: tuple[tuple[str, str], ...]
    pieces: tuple[ShadedText, ...]
    left_out: int = 0
    """Tokens that are not shown."""


@frozen
class Shown:
    """Passages by the heading that they stand under, and why there are none where there are none."""

    groups: tuple[tuple[str, tuple[Passage, ...]], ...] = ()
    notes: tuple[str, ...] = field(default=())


def show_samples(run: RunFacts) -> Shown:
    """Return the samples that the run kept: tokens shaded by loss weight, pairs side by side."""
    samples = read_samples(run.directory.samples)
    if not samples:
        return Shown(notes=("This run kept no samples.",))
    decode, notes = _decoder(run)
    groups = []
    for unit, members in groupby(samples, key=lambda sample: sample.unit):
        passages = tuple(_show_sample(sample, decode) for sample in sorted(members, key=lambda sample: sample.role or 0))
        groups.append((f"{'Pair' if len(passages) > 1 else 'Sample'} {unit + 1}", passages))
    return Shown(tuple(groups), notes)


def show_attempts(run: RunFacts) -> Shown:
    """Return the best, the median and the worst attempt of the first, the middle and the last step that the journal holds."""
    index = read_index(run.directory.rollouts, read_listing(run.directory))
    moments = list_moments(index)
    if not moments:
        return Shown(notes=("The journal holds no attempt that was trained on.", *index.losses))
    decode, notes = _decoder(run)
    groups = []
    for step in moments:
        passages = tuple(_show_attempt(name, attempt, decode) for name, attempt in choose_by_rank(index, step))
        groups.append((f"Step {step:,}", passages))
    return Shown(tuple(groups), (*notes, *index.losses))


def _decoder(run: RunFacts) -> tuple[Decode, tuple[str, ...]]:
    decode, why = decoder_of(run.directory)
    if decode is not None:
        return decode, ()
    return (lambda ids: "".join(f"{token_id} " for token_id in ids)), (f"Token ids are shown: {why}.",)


_ROLES = ("Chosen", "Rejected")


def _show_sample(sample: KeptSample, decode: Decode) -> Passage:
    weights = np.asarray(sample.loss_weights[:SHOWN])
    largest = max(float(np.abs(weights).max(initial=0.0)), 1e-30)
    pieces = []
    for begin, end in _runs(weights):
        weight = float(weights[begin])
        text = _text(decode, sample.token_ids[begin:end])
        pieces.append(
            ShadedText(text, "weight", abs(weight) / largest, tells=f"loss weight {weight:.4g}") if weight else ShadedText(text)
        )
    trained = int(np.count_nonzero(np.asarray(sample.loss_weights)))
    heading = "" if sample.role is None else _ROLES[sample.role]
    facts = (("tokens", f"{sample.tokens:,}"), ("with loss", f"{trained:,}"))
    return Passage(heading, facts, tuple(pieces), sample.tokens - len(weights))


def _show_attempt(name: str, placed: PlacedAttempt, decode: Decode) -> Passage:
    attempt, learned = placed.trajectory, placed.learned
    facts = [("environment", placed.group.environment), ("task", placed.group.task_key), ("reward", f"{attempt.reward:.4g}")]
    facts += [(f"reward, {part}", f"{value:.4g}") for part, value in attempt.parts.items()]
    facts += [("sampled tokens", f"{len(attempt.logprobs):,}"), ("ended by", ", ".join(attempt.stops) or attempt.status)]
    if learned is not None and len(learned.advantages):
        gaps = np.abs(learned.trained_logprobs - attempt.logprobs)
        facts += [("advantage", f"{float(learned.advantages.mean()):.4g}"), ("largest gap", f"{float(gaps.max()):.2g} nats")]
    pieces = tuple(_pieces_of(attempt, learned, decode))
    return Passage(f"{name.capitalize()}", tuple(facts), pieces, max(0, len(attempt.token_ids) - SHOWN))


def _pieces_of(attempt: Trajectory, learned: LearnedAttempt | None, decode: Decode) -> Iterator[ShadedText]:
    drawn = 0
    for kind, places in segments_of(attempt):
        stop = min(places.stop, SHOWN)
        if places.start >= stop:
            return
        token_ids = attempt.token_ids[places.start : stop].tolist()
        if kind != SEGMENT_SAMPLED:
            yield ShadedText(_text(decode, token_ids), "context")
            continue
        count = len(token_ids)
        if learned is None:
            yield ShadedText(_text(decode, token_ids), "sampled", tells="sampled by the model")
        else:
            advantages = learned.advantages[drawn : drawn + count]
            gaps = np.abs(learned.trained_logprobs - attempt.logprobs)[drawn : drawn + count]
            levels = np.digitize(gaps, GAPS)
            for begin, end in _runs(np.stack([advantages, levels.astype(np.float32)], axis=1)):
                advantage = float(advantages[begin])
                kind_of_piece = "plus" if advantage > 0 else "minus" if advantage < 0 else "sampled"
                tells = f"advantage {advantage:.4g}, gap up to {float(gaps[begin:end].max()):.2g} nats"
                yield ShadedText(
                    _text(decode, token_ids[begin:end]), kind_of_piece, min(1.0, abs(advantage) / 2), int(levels[begin]), tells
                )
        drawn += places.stop - places.start


GAPS = (1e-4, 1e-2, 0.1)
"""Nats from which a gap is drawn as a thin, a thick and a double line."""


def _runs(values: Any) -> Iterator[tuple[int, int]]:
    """Yield begin and end of every stretch of equal rows of `values` [n] or [n, k]."""
    count = len(values)
    if not count:
        return
    rows = values.reshape(count, -1)
    bounds = [0, *(np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1).tolist(), count]
    yield from pairwise(bounds)


def _text(decode: Decode, token_ids: Sequence[int]) -> str:
    return visible(decode(token_ids))
