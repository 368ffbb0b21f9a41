"""A judge that compares two texts: what it is asked, and what becomes of its letters. The judge itself is a real one over a file of answers."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_engine_openai import Judge, PairwiseJudge
from skyrl_engine_openai.judge import Judgement
from skyrl_engine_openai.pairwise import PROMPT

COST = {"judge/requests": 1.0}


class Answering(Judge):
    """A judge whose answer to two texts is `verdict(first, second)`."""

    def __init__(self, verdict: Callable[[str, str], str]) -> None:
        super().__init__("http://127.0.0.1:9/v1", "m")
        self.verdict, self.asked = verdict, []  # type: ignore[var-annotated]

    def __call__(self, messages: Any) -> Judgement:
        first, second = re.search(r"# Answer A\n\n(.*)\n\n# Answer B\n\n(.*)\n\nReply", messages, re.DOTALL).groups()  # type: ignore[union-attr]
        self.asked.append((first, second))
        return Judgement(self.verdict(first, second), "stop", COST)


def longest(first: str, second: str) -> str:
    return "A" if len(first) > len(second) else " b." if len(first) < len(second) else "T"


def always_first(_first: str, _second: str) -> str:
    return "A"


def never_one(_first: str, _second: str) -> str:
    return "Both are good"


def rewards(judge: PairwiseJudge, *texts: str) -> list[float]:
    return [result.reward for result in judge("which?", texts)]


def test_a_reward_is_the_share_of_comparisons_won() -> None:
    judge = Answering(longest)
    results = PairwiseJudge(judge)("which?", ("aa", "aaaa", "a", "bb"))
    assert [result.reward for result in results] == pytest.approx([1.5 / 3, 1.0, 0.0, 1.5 / 3])
    assert sorted(judge.asked) == sorted((a, b) for a in ("aa", "aaaa", "a", "bb") for b in ("aa", "aaaa", "a", "bb") if a != b)
    assert sum(result.metrics.get("judge/requests", 0) for result in results) == 12
    assert sum(result.metrics.get("judge/ties", 0) for result in results) == 1
    # the places of texts in the group say nothing
    assert rewards(PairwiseJudge(judge), "bb", "a", "aaaa", "aa") == [results[k].reward for k in (3, 2, 1, 0)]


def test_a_judge_that_prefers_a_place_favours_no_text() -> None:
    judge = PairwiseJudge(Answering(always_first))
    first, second = judge("which?", ("one", "two"))
    assert (first.reward, second.reward) == (0.5, 0.5)
    assert first.metrics == {"judge/requests": 2.0, "judge/unreadable": 0.0, "judge/ties": 1.0, "judge/contradictions": 1.0}
    once = PairwiseJudge(Answering(always_first), orders="one")
    won = [rewards(once, f"one {number}", f"two {number}") for number in range(40)]
    assert 8 < sum(first for first, _ in won) < 32
    assert won == [rewards(once, f"two {number}", f"one {number}")[::-1] for number in range(40)]


def test_equal_texts_are_not_asked_about_and_what_is_no_letter_is_a_tie() -> None:
    judge = Answering(never_one)
    results = PairwiseJudge(judge, orders="one")("which?", ("same", "same", "other"))
    assert [result.reward for result in results] == [0.5, 0.5, 0.5]
    assert len(judge.asked) == 2
    assert sum(result.metrics.get("judge/unreadable", 0) for result in results) == 2
    assert [result.reward for result in PairwiseJudge(judge)("which?", ("same", "same"))] == [0.5, 0.5]


def test_each_text_may_meet_some_of_the_others() -> None:
    judge = Answering(longest)
    texts = ["a" * number for number in range(1, 7)]
    PairwiseJudge(judge, orders="one", opponents=1)("which?", texts)
    assert {frozenset(map(len, pair)) for pair in judge.asked} == {
        frozenset(pair) for pair in ((1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 1))
    }


def test_a_text_that_looks_like_a_place_stays_as_it_is() -> None:
    judge = Answering(longest)
    rewards(PairwiseJudge(judge, orders="both"), "{second} \\1", "x")
    assert ("{second} \\1", "x") in judge.asked


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"prompt": "{question} {first}"}, "{second}"), ({"orders": "any"}, "orders"), ({"opponents": 0}, "never compared")],
)
def test_settings_that_compare_nothing_are_refused(settings: Any, words: str) -> None:
    assert "{question}" in PROMPT
    with pytest.raises(ValueError, match=words):
        PairwiseJudge(Answering(longest), **settings)
