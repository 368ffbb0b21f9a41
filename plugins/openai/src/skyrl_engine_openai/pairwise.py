"""A judge that is shown two attempts of a group at once, in an order that favours neither."""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

from attrs import frozen

from skyrl_engine.contracts import StepResult
from skyrl_engine_openai.judge import Judge

Orders = Literal["both", "one"]

PROMPT: Final = """Two answers to one question follow. Which is better?

# Question

{question}

# Answer A

{first}

# Answer B

{second}

Reply with one letter: A, B, or T if they are equally good."""

_VERDICT: Final = re.compile(r"\W*([ABT])\b", re.IGNORECASE)
_SCORES: Final = {"A": 1.0, "B": 0.0, "T": 0.5}
"""Share of a comparison that the first answer wins, by the judge's letter."""


@frozen
class _Question:
    """A question to the judge: the number of the attempt that is shown first, and of the other one."""

    first: int
    second: int


class PairwiseJudge:
    """Compares the attempts of a group two by two: `compare(question, texts)` returns one `StepResult` per text, in their order.

    The reward of a text is the share of its comparisons that it won, from 0 to 1; a tie is half. Judges prefer a place, mostly the first:
    with the orders "both" each pair is asked about twice, and contradictory answers are a tie; with "one" it is asked about once, in an order
    that its texts' hash decides, so that neither place is favoured over many pairs, and a resumed run asks the same. Equal texts are a tie,
    unasked. `opponents` limits the comparisons of a text: the k-th text meets the k + 1st to k + `opponents`-th, round the group; None: each
    meets each. `prompt` has the places {question}, {first} and {second}, and asks for A, B or T.

    Metrics are those of `Judge`, and `judge/ties` (pairs without a winner), `judge/contradictions` (pairs of which both orders named a winner,
    and not the same one) and `judge/unreadable` (answers without a letter, which count as ties). A pair's are with its first text. A group's
    questions are under way together, as many as the judge's `concurrency`.

    Raises ValueError for a prompt without these places, and for settings that ask nothing.
    """

    def __init__(self, judge: Judge, *, prompt: str = PROMPT, orders: Orders = "both", opponents: int | None = None) -> None:
        missing = [name for name in ("question", "first", "second") if f"{{{name}}}" not in prompt]
        if missing:
            raise ValueError(f"the prompt has no place for {missing[0]}: write {{{missing[0]}}} into it")
        if orders not in ("both", "one"):
            raise ValueError(f'orders is {orders!r}, and may be "both" or "one"')
        if opponents is not None and opponents < 1:
            raise ValueError(f"a text that meets opponents = {opponents} others is never compared")
        self._judge, self._prompt, self._orders, self._opponents = judge, prompt, orders, opponents

    def __call__(self, question: str, texts: Sequence[str]) -> list[StepResult]:
        """Compare texts that answer a question. Raises RolloutError where the endpoint gives no answer."""
        pairs = self._choose_pairs(len(texts))
        questions = {pair: self._choose_orders(texts, *pair) for pair in pairs}
        asked = [one for both in questions.values() for one in both]
        with ThreadPoolExecutor(max(1, min(len(asked), self._judge.concurrency))) as threads:
            said = dict(zip(asked, threads.map(lambda one: self._ask(question, texts, one), asked), strict=True))
        won, met = [0.0] * len(texts), [0] * len(texts)
        metrics: list[dict[str, float]] = [{} for _ in texts]
        for (left, right), both in questions.items():
            scores = []
            for one in both:
                score, cost = said[one]
                scores.append(score if one.first == left else 1.0 - score)
                _add(metrics[left], cost)
            share = sum(scores) / len(scores) if scores else 0.5
            won[left], won[right] = won[left] + share, won[right] + 1.0 - share
            met[left], met[right] = met[left] + 1, met[right] + 1
            _add(
                metrics[left],
                {"judge/ties": float(share == 0.5), "judge/contradictions": float(set(scores) == {0.0, 1.0})},
            )
        return [
            StepResult(share / count if count else 0.5, metrics=own) for share, count, own in zip(won, met, metrics, strict=True)
        ]

    def _choose_pairs(self, count: int) -> list[tuple[int, int]]:
        """Return the pairs (left, right) of numbers of texts, each once and left below right."""
        most = count - 1 if self._opponents is None else min(self._opponents, count - 1)
        ring = {tuple(sorted((number, (number + step) % count))) for number in range(count) for step in range(1, most + 1)}
        return sorted((left, right) for left, right in ring)

    def _choose_orders(self, texts: Sequence[str], left: int, right: int) -> tuple[_Question, ...]:
        """Return the questions about a pair; none about equal texts."""
        if texts[left] == texts[right]:
            return ()
        straight, turned = _Question(left, right), _Question(right, left)
        if self._orders == "both":
            return straight, turned
        low, high = sorted((texts[left], texts[right]))
        swaps = hashlib.sha256(f"{len(low)} {low}{high}".encode(errors="surrogatepass")).digest()[0] % 2 == 1
        return (straight,) if (texts[left] == low) != swaps else (turned,)

    def _ask(self, question: str, texts: Sequence[str], one: _Question) -> tuple[float, dict[str, float]]:
        """Return the share that the text shown first wins, and what the question cost."""
        places = {"question": question, "first": texts[one.first], "second": texts[one.second]}
        said = self._judge(re.sub(r"\{(question|first|second)\}", lambda match: places[match[1]], self._prompt))
        verdict = _VERDICT.match(said.text)
        score = 0.5 if verdict is None else _SCORES[verdict[1].upper()]
        return score, {**said.metrics, "judge/unreadable": float(verdict is None)}


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
