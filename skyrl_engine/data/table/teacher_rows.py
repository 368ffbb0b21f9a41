"""Check a teacher's columns of a row: its k likeliest tokens and their log-probabilities, refused where they are no part of a distribution."""

import numpy as np

from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.data.sources.rows import Row

TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""The columns [A, k] of token ids and of log-probabilities in nats."""

LARGEST_LOGPROB = 1e-3
"""A log-probability may be so far above 0: a difference of rounded logits is."""

LARGEST_MASS = 1.01
"""The probabilities of a token's k may add up to so much, where log-probabilities were rounded to the 8 bits of bfloat16."""


def check_teacher(row: Row, ids: AnyArray, logprobs: AnyArray, loss: AnyArray, first: int) -> None:
    """Refuse what no distribution says, at tokens [A] with `loss`, of `ids` int64[A, k] and `logprobs` float32[A, k].

    `first` counts the tokens before. Raises DataError naming the row and the token for a log-probability above 0, probabilities that add up to
    more than 1, and an id that is named twice.
    """
    if ids.shape != logprobs.shape:
        raise row.wrong(
            TEACHER_LOGPROBS,
            f"it has {logprobs.shape[1]} numbers per token, and {TEACHER_IDS} has {ids.shape[1]}",
            "Give every token as many log-probabilities as ids",
        )
    if (place := _first((logprobs > LARGEST_LOGPROB).any(1) & loss)) is not None:
        raise row.wrong(
            TEACHER_LOGPROBS,
            f"{logprobs[place].max():g} stands at token {first + place}, and no logarithm of a probability is above 0",
            "Store log-probabilities, in nats, of the softmax over the teacher's vocabulary: no probabilities and no logits",
        )
    with np.errstate(under="ignore"):
        mass = np.exp(logprobs.astype(np.float64)).sum(1)
    if (place := _first((mass > LARGEST_MASS) & loss)) is not None:
        raise row.wrong(
            TEACHER_LOGPROBS,
            f"the probabilities at token {first + place} add up to {mass[place]:.4g}, more than 1",
            "Store log-probabilities, in nats, of one softmax over the teacher's vocabulary",
        )
    ordered = np.sort(ids, 1)
    if (place := _first((ordered[:, 1:] == ordered[:, :-1]).any(1) & loss)) is not None:
        twice = ordered[place][1:][ordered[place][1:] == ordered[place][:-1]][0]
        raise row.wrong(
            TEACHER_IDS,
            f"token id {twice} is named twice at token {first + place}",
            "Name every id once; fill up with other ids, at a log-probability of -100 or less",
        )


def _first(wrong: AnyArray) -> int | None:
    return int(np.argmax(wrong)) if wrong.any() else None
