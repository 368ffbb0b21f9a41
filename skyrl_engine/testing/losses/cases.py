"""Batches that promises about losses are tried on, and what they all ask of a loss."""

from typing import Any

from hypothesis import strategies as st

from skyrl_engine.testing.comparison import (
    same_evaluation,
)
from skyrl_engine.testing.promise import Undecidable
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import rollouts
from skyrl_engine.testing.tokens.evaluation import Evaluation, decided
from skyrl_engine.testing.tokens.rollouts import CutBatch, TokenBatch

PLAIN_VALUES = "Return plain values per token and use the reducer token_mean, or another, which knows the counts of the whole batch"
BY_NATURE = "; where it depends on the cut by nature, declare batch_local = True"


def needs_of(subject: Subject[Any]) -> tuple[str, ...]:
    return tuple(subject.make().needs)


def ordinary(subject: Subject[Any]) -> st.SearchStrategy[TokenBatch]:
    return rollouts.batches(needs_of(subject))


def some_long(subject: Subject[Any]) -> st.SearchStrategy[TokenBatch]:
    return rollouts.batches(needs_of(subject), long=True)


def anything(subject: Subject[Any]) -> st.SearchStrategy[TokenBatch]:
    ranges: tuple[rollouts.Range, ...] = ("ordinary", "extreme")
    return st.sampled_from(ranges).flatmap(lambda range_: rollouts.batches(needs_of(subject), range_=range_))


def batch_local(subject: Subject[Any]) -> str | None:
    return "the loss declares batch_local: it depends on the cut by nature" if subject.declares("batch_local") else None


def decided_evaluation(subject: Subject[Any], batch: TokenBatch, **options: Any) -> Evaluation:
    return decided(subject.label, subject.make(), batch, **options)


def unless_random(subject: Subject[Any], batch: TokenBatch) -> None:
    """Called where numbers differ: of a loss that answers the same batch differently they say nothing; `replicas` is about that."""
    if not same_evaluation(decided_evaluation(subject, batch), decided_evaluation(subject, batch)):
        raise Undecidable("the loss gives other values for the same batch every time")


def cuts(subject: Subject[Any]) -> st.SearchStrategy[CutBatch]:
    return rollouts.cut_batches(needs_of(subject))
