"""Several answers to one prompt, of which numbers say which is better, as one pair: the best against the worst.

UltraFeedback (Cui et al. 2023, arXiv:2310.01377) has four rated completions per instruction, Nectar seven ranked answers per prompt, the
Stanford Human Preferences (Ethayarajh et al. 2022, arXiv:2110.08420) two answers per post and which of them is preferred, and HelpSteer3
(Wang et al. 2025, arXiv:2503.04378) two with a number that says by how much. In HelpSteer (Wang et al. 2023, arXiv:2311.09528) the answers to
a prompt are rows of their own, each with ratings: `gathered` makes one row of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from skyrl_engine.data.sources.files import Content, DatasetPart, Scan, parse_row
from skyrl_engine.data.sources.preferences import Half, find_named_column, pair_of
from skyrl_engine.data.sources.questions import PROMPTS, Prompt, find_prompt
from skyrl_engine.data.sources.rows import Row, Source, kind_of
from skyrl_engine.data.text.messages import messages_of

COMPLETIONS: Final = ("completions", "answers")
COMPARED: Final = (("human_ref_A", "response1", "response_1"), ("human_ref_B", "response2", "response_2"))
PREFERRED: Final = ("labels", "overall_preference", "preference_strength")
"""Columns that say which of two answers is better: SHP's is 1 for the first and 0 for the second, HelpSteer's negative for the first."""
OF_A_ROW: Final = "helpfulness"
"""The rating of answers that are rows of their own."""
_TEXTS: Final = ("response", "answer")
_RATING, _RANK = "overall_score", "rank"


def pair_by_rating(row: Row, rating: str | None, *, has_template: bool) -> tuple[Half, Half] | None:
    """Return the half with the highest number `rating` and that with the lowest, of several such the first; None where all are rated alike.

    Without `rating` it is `overall_score`, or `rank`, of which the lowest number is the best, where answers have that alone. With a chat
    template both are a question and its answer, without one plain texts with an empty line between. Raises DataError naming the row for fewer
    than two answers, for an answer or a rating that is missing or of another kind, and for what `pair_of` refuses.
    """
    column = find_named_column(row, COMPLETIONS)
    completions = row.values.get(column)
    answers = list(completions) if isinstance(completions, list | tuple) else []
    if len(answers) == 1 and row.values.get(_GATHERED):
        return None
    if len(answers) < 2:
        raise row.wrong(column, "two rated answers or more are needed", "Give the row several answers, or leave it out")
    chosen_rating = rating or _usual_rating(answers)
    ratings = [_rating(row, column, place, answer, chosen_rating) for place, answer in enumerate(answers)]
    best, worst = ratings.index(max(ratings)), ratings.index(min(ratings))
    if best == worst:
        return None
    return _pair(row, [_text(row, column, place, answers[place]) for place in (best, worst)], has_template=has_template)


def pair_by_comparison(row: Row, *, has_template: bool) -> tuple[Half, Half] | None:
    """Return the better one of two answers and the worse one, None where neither is better. Raises DataError as `rated_pair` does."""
    columns = [find_named_column(row, names) for names in COMPARED]
    texts = []
    for column in columns:
        value = row.values.get(column)
        if not isinstance(value, str):
            raise row.wrong(column, f"a string is needed, not {kind_of(value)}", "Store the answer as text")
        texts.append(value)
    column = find_named_column(row, PREFERRED)
    value = row.values.get(column)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise row.wrong(column, f"{value!r} is no number that says which answer is better", "Store one, or leave the row out")
    if column == PREFERRED[0] and value not in (0, 1):
        raise row.wrong(column, f"{value!r} is neither 0 nor 1", "Store 1 where the first answer is better, 0 where the second is")
    second_is_better = value == 0 if column == PREFERRED[0] else value > 0
    if column != PREFERRED[0] and value == 0:
        return None
    return _pair(row, texts[::-1] if second_is_better else texts, has_template=has_template)


def _pair(row: Row, answers: Sequence[str], *, has_template: bool) -> tuple[Half, Half]:
    """Return the pair of these answers, the better first, to the row's question."""
    prompt = _question(row)
    values: dict[str, Any] = dict(zip(("chosen", "rejected"), answers, strict=True))
    if prompt.is_text and not has_template:
        values["prompt"] = "".join(f"{part}\n\n" for part in (prompt.system, prompt.content, prompt.context) if part)
    else:
        values["prompt"] = prompt.messages(row)
    return pair_of(evolve(row, values=values), has_template=has_template)


def _question(row: Row) -> Prompt:
    if isinstance(context := row.values.get("context"), list | tuple) and context:
        return Prompt("context", messages_of(row, "context"))
    if row.values.get("human_ref_A") is not None and isinstance(post := row.values.get("history"), str):
        return Prompt("history", post)
    prompt = find_prompt(row, PROMPTS)
    if prompt is None:
        raise row.wrong("prompt", f"a string is needed, not {kind_of(None)}", "Store the question as text")
    return prompt


def _usual_rating(answers: Sequence[Any]) -> str:
    first = answers[0] if isinstance(answers[0], Mapping) else {}
    return next((name for name in (_RATING, _RANK, OF_A_ROW) if first.get(name) is not None), _RATING)


def _rating(row: Row, column: str, place: int, answer: Any, rating: str) -> float:
    value = answer.get(rating) if isinstance(answer, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        has = ", ".join(map(repr, answer)) if isinstance(answer, Mapping) else kind_of(answer)
        raise row.wrong(
            column,
            f"answer {place} has no number {rating!r}" + (f": {value!r} stands there" if value is not None else f"; it has {has}"),
            'Set data.rating to the name of the number that rates answers, such as "fine-grained_score", or leave the row out',
        )
    return -float(value) if rating == _RANK else float(value)


def _text(row: Row, column: str, place: int, answer: Mapping[str, Any]) -> str:
    value = next((answer[name] for name in _TEXTS if answer.get(name) is not None), None)
    if not isinstance(value, str) or not value.strip():
        raise row.wrong(column, f"answer {place} has no text {_TEXTS[0]!r}", "Give it one, or leave the row out")
    return value


_GATHERED: Final = "skyrl_engine.gathered"
"""Key of rows that were made of several."""


def gather_answers(source: Source, rating: str | None) -> Source:
    """Return the source with rows of one rated answer each made rows of all answers to a prompt, where its rows are such; else the source
    itself.

    `rating` is the number that rates answers; without it, `helpfulness`. Answers to one prompt are in rows that follow each other.
    """
    number = rating or OF_A_ROW
    prompt, response = (source.names.get(name, name) for name in ("prompt", "response"))
    first = next(iter(source.parts[0].read()), None) if source.parts else None
    if first is None:
        return source
    where, content = first
    values = parse_row(content, where)
    others = ("completion", "completions", "answers", "chosen", "rejected", "label", "kto_tag")
    if not all(isinstance(values.get(name), str) for name in (prompt, response)) or any(name in values for name in others):
        return source
    if not isinstance(values.get(number), int | float) or isinstance(values.get(number), bool):
        return source
    names = {ours: theirs for ours, theirs in source.names.items() if ours != "response"}
    return evolve(source, parts=[GatheredAnswers(part, prompt, response) for part in source.parts], names=names)


@frozen(slots=False)
class GatheredAnswers(DatasetPart):
    """A part whose rows that follow each other and have the same prompt are one row, with a list `completions` of what else they hold."""

    part: DatasetPart
    prompt: str
    response: str

    @property
    def folder(self) -> Path | None:
        return self.part.folder

    def scan(self) -> Scan:
        return Scan(f"gathered by {self.prompt}: {self.part.scan().digest}", len(self._rows))

    def read(self) -> Iterator[tuple[str, Content]]:
        return iter(self._rows)

    def at(self, index: int) -> tuple[str, Content]:
        return self._rows[index]

    @cached_property
    def _rows(self) -> list[tuple[str, Mapping[str, Any]]]:
        rows: list[tuple[str, dict[str, Any]]] = []
        for where, content in self.part.read():
            values = dict(parse_row(content, where))
            prompt, text = values.pop(self.prompt, None), values.pop(self.response, None)
            answer = {**values, "response": text}
            if rows and rows[-1][1][self.prompt] == prompt:
                rows[-1][1]["completions"].append(answer)
            else:
                rows.append((where, {self.prompt: prompt, "completions": [answer], _GATHERED: True}))
        return list(rows)
