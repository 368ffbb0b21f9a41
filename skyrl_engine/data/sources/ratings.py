"""Rows that hold several answers to one prompt with a rating each, such as UltraFeedback's, as one pair: the best rated against the worst.

UltraFeedback (Cui et al. 2023, arXiv:2310.01377) has four completions per instruction, each with `response`, `overall_score` and
`fine-grained_score`.
"""

import math
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl_engine.data.sources.preferences import Half, pair_of
from skyrl_engine.data.sources.rows import Row, kind_of

COMPLETIONS, ASKED = "completions", ("prompt", "instruction")
_TEXT = "response"


def rated_pair(row: Row, rating: str, *, has_template: bool) -> tuple[Half, Half] | None:
    """Return the half with the highest number `rating` and that with the lowest, of several such the first; None where all are rated alike.

    With a chat template both are a question and its answer, without one plain texts with an empty line between. Raises DataError naming the
    row for fewer than two answers, for an answer or a rating that is missing or of another kind, and for what `pair_of` refuses.
    """
    prompt = next((row.values[name] for name in ASKED if row.values.get(name) is not None), None)
    if not isinstance(prompt, str):
        raise row.wrong(ASKED[0], f"a string is needed, not {kind_of(prompt)}", "Store the question as text")
    given = row.values.get(COMPLETIONS)
    answers = list(given) if isinstance(given, list | tuple) else []
    if len(answers) < 2:
        raise row.wrong(COMPLETIONS, "two rated answers or more are needed", "Give the row several answers, or leave it out")
    ratings = [_rating(row, place, answer, rating) for place, answer in enumerate(answers)]
    best, worst = ratings.index(max(ratings)), ratings.index(min(ratings))
    if best == worst:
        return None
    chosen, rejected = (_text(row, place, answers[place]) for place in (best, worst))
    if has_template:
        values: dict[str, Any] = {
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
    else:
        values = {"prompt": f"{prompt}\n\n", "chosen": chosen, "rejected": rejected}
    return pair_of(evolve(row, values=values), has_template=has_template)


def _rating(row: Row, place: int, answer: Any, rating: str) -> float:
    value = answer.get(rating) if isinstance(answer, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        has = ", ".join(map(repr, answer)) if isinstance(answer, Mapping) else kind_of(answer)
        raise row.wrong(
            COMPLETIONS,
            f"answer {place} has no number {rating!r}" + (f": {value!r} stands there" if value is not None else f"; it has {has}"),
            'Set data.rating to the name of the number that rates answers, such as "fine-grained_score", or leave the row out',
        )
    return float(value)


def _text(row: Row, place: int, answer: Mapping[str, Any]) -> str:
    value = answer.get(_TEXT)
    if not isinstance(value, str) or not value.strip():
        raise row.wrong(COMPLETIONS, f"answer {place} has no text {_TEXT!r}", "Give it one, or leave the row out")
    return value
