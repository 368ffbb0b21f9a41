"""The parts of a demo: a model, data, a configuration, and a measure of what was learned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

TRAIN_FILE = "train.jsonl"
HELD_OUT_FILE = "held-out.jsonl"


@frozen
class Exchange:
    """One question and the answer to learn."""

    question: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]


@frozen
class Examination:
    """Answers a model gave to held-out questions.

    `score` is what the demo reports of them (None: only the answers are shown), `rewards` what a verifier pays for each, 0 to 1.
    """

    questions: Sequence[str]
    answers: Sequence[str]
    expected: Sequence[str]
    score: float | None = None
    rewards: Sequence[float] = ()


@frozen
class Preparation:
    """The demo's directory once it is prepared: `config` is the table of its configuration file, `facts` are lines about it for a person."""

    config: Mapping[str, Any]
    model: Path
    facts: Sequence[str]


class DemoRecipe(Protocol):
    """One demo. `score_name` names its score, None when the held-out loss is the measure."""

    name: str
    default_steps: int
    score_name: str | None

    def prepare(self, directory: Path, steps: int) -> Preparation:
        """Write model, data and nothing else into `directory`. Raises ModelError or DataError for a package that is missing."""

    def examine(self, model: Path) -> Examination:
        """Ask the model in a Hugging Face directory the held-out questions, greedily."""

    def tasks(self) -> tuple[Sequence[Exchange], Sequence[Exchange]] | None:
        """Return the exchanges to be rewarded for in a second act, and those held out; None where there is no such act."""


def write_exchanges(path: Path, exchanges: Sequence[Exchange]) -> None:
    """One JSON object with `messages` per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"messages": exchange.messages()}, ensure_ascii=False) + "\n" for exchange in exchanges)
    path.write_text(text, encoding="utf-8")


def split_held_out(exchanges: Sequence[Exchange], held_out: int, seed: int) -> tuple[list[Exchange], list[Exchange]]:
    """Training and held-out exchanges in random order; every question occurs once, so that none is in both."""
    import random

    unique = list({exchange.question.casefold(): exchange for exchange in reversed(exchanges)}.values())
    random.Random(seed).shuffle(unique)  # noqa: S311 - a reproducible split, no secret
    return unique[held_out:], unique[:held_out]
