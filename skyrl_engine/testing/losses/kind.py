"""Losses as a kind of plugin that gives one number per token."""

from typing import Any

from skyrl_engine.testing.losses.evaluation import evaluate
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens.kind import TokenKind


def batch_local(subject: Subject[Any]) -> str | None:
    """Return the reason why a subject does not claim promises about cuts, None if it does."""
    return "the loss declares batch_local: it depends on the cut by nature" if subject.declares("batch_local") else None


LOSS = TokenKind(
    evaluate,
    noun="loss",
    results="loss and gradient",
    products="losses",
    remedy="Return plain values per token and use the reducer token_mean, or another, which knows the counts of the whole batch",
    batch_local=batch_local,
    unless="; where it depends on the cut by nature, declare batch_local = True",
)
