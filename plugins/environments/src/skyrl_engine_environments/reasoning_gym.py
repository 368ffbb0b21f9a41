"""`reasoning_gym`: the procedural data sets of reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), all of them by name."""

import importlib.metadata
import math
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import define, field, frozen

from skyrl_engine import DataError
from skyrl_engine.contracts import Action, EnvironmentClaims, Message, Split, StepResult, Task, Tasks
from skyrl_engine.near_words import did_you_mean
from skyrl_engine_environments.options import ReasoningGymOptions
from skyrl_engine_environments.requirements import require_package

_LONGEST = 10_000
"""Characters of an answer that are scored at least."""

_HUGE = re.compile(r"\d\.?[eE][+-]?\d{4}|\*\*\s*\(?[\d.]{4}|\*\*[^*\n]*\*\*")
"""Numbers and towers of powers that take more memory than there is, once a scorer computes them exactly."""

_SMALL = {"acre", "word_ladder"}
"""Data sets that make all their tasks when they are made, or that do not have many."""

_MANY, _FEW = 1_000_000, 1000

_EVAL_SEED = 2**31 - 1
"""Seeds of held-out tasks count down from here, those of training tasks up from 0."""


@define(eq=False)
class ReasoningGymEnvironment:
    """Poses the questions of data sets and scores answers by their own scorers."""

    options: ReasoningGymOptions
    claims: EnvironmentClaims = field(init=False)
    round: tuple[tuple[str, int], ...] = field(init=False)
    """A round of the mixture: the data set of every place, and how many places before it are the same set's."""
    _sets: dict[tuple[str, Split], Any] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        require_package("reasoning_gym", "reasoning_gym")
        if self.options.answer_pattern is not None:
            _compile_pattern(self.options.answer_pattern)
        self.round = _round({name: self.options.weights.get(name, 1) for name in self.names})
        self.claims = EnvironmentClaims(
            pass_threshold=self.options.pass_threshold, version=f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the data sets."""
        task = self.options.task
        return (task,) if isinstance(task, str) else tuple(task)

    def tasks(self, split: Split) -> Tasks:
        """Return the tasks of a split; sets are mixed in rounds. Raises DataError for a set or an option that reasoning-gym does not have."""
        return ReasoningGymTasks(self, split, self.size(split))

    def open(self, task: Task, seed: int) -> "ReasoningGymEpisode":  # noqa: ARG002 -- scoring draws nothing
        return ReasoningGymEpisode(self, task)

    def solve(self, task: Task) -> str | None:
        """Return the data set's own answer."""
        answer = task.data["entry"].get("answer")
        return None if answer is None else str(answer)

    def size(self, split: Split) -> int:
        """Return the number of tasks of a split."""
        if split == "eval":
            return self.options.eval_size
        few = not _SMALL.isdisjoint(self.names)
        return self.options.size or (_FEW if few else _MANY)

    def dataset(self, name: str, split: Split) -> Any:
        """Make, or return, a data set of a split."""
        key = (name, split)
        if key not in self._sets:
            self._sets[key] = self._make_dataset(name, split)
        return self._sets[key]

    def entry(self, name: str, split: Split, number: int) -> Mapping[str, Any]:
        """Make one question of a data set, a function of its number."""
        dataset = self.dataset(name, split)
        with _own_randomness(dataset.seed or 0, number + 1):
            entry: Mapping[str, Any] = dataset[number]
        return entry

    def _make_dataset(self, name: str, split: Split) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib 2.4, when it is compiled on its first import
            from reasoning_gym.factory import DATASETS, create_dataset

        if name not in DATASETS:
            remedy = did_you_mean(name, DATASETS) or f"It has {', '.join(sorted(DATASETS))}"
            raise DataError(f"reasoning-gym has no data set {name!r}", remedy=remedy)
        config: Mapping[str, Any] = self.options.config
        own = config.get(name, {}) if len(self.names) > 1 else config
        rounds = -(-self.size(split) // len(self.round))
        size = rounds * self.options.weights.get(name, 1)
        seed = self.options.seed if split == "train" else _EVAL_SEED - self.options.seed
        try:
            with _own_randomness(seed, 0):
                return create_dataset(name, **{**own, "seed": seed, "size": size})
        except (TypeError, AssertionError, ValueError) as error:
            raise DataError(f"reasoning-gym's data set {name!r} refuses its options: {error}", remedy="Correct `config`") from error


@frozen(eq=False)
class ReasoningGymTasks:
    """Tasks of the sets in rounds, in which every set has as many tasks as its weight says."""

    environment: ReasoningGymEnvironment
    split: Split
    size: int

    def __attrs_post_init__(self) -> None:
        for name in self.environment.names:
            self.environment.dataset(name, self.split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        rounds, place = divmod(index, len(self.environment.round))
        name, before = self.environment.round[place]
        number = rounds * self.environment.options.weights.get(name, 1) + before
        entry = self.environment.entry(name, self.split, number)
        if self.environment.options.exact and entry.get("answer") is None:
            raise DataError(f"reasoning-gym's data set {name!r} gives no answers of its own", remedy="Leave out `exact`")
        data = {"dataset": name, "split": self.split, "number": number, "entry": _plain(entry)}
        return Task(f"{name}/{self.split}/{number}", self.environment.options.messages(str(entry["question"])), data=data)


@define(eq=False)
class ReasoningGymEpisode:
    """One answer to one question."""

    environment: ReasoningGymEnvironment
    task: Task

    def begin(self) -> tuple[Message, ...]:
        return ()

    def step(self, action: Action) -> StepResult:
        """Score the answer."""
        options = self.environment.options
        answer = answer_in(action.text, options.answer_pattern)
        due = self.environment.solve(self.task)
        exact = answer is not None and due is not None and answer.strip() == due.strip()
        score, info = float(exact), dict[str, str]()
        if not options.exact and not exact:
            score, info = self._by_its_scorer(answer)
        metrics = {"exact": float(exact), **({"scorer_failed": 1.0} if info else {})}
        if answer is not None:
            info = {**info, "answer": answer}
        return StepResult(score, metrics=metrics, success=score >= options.pass_threshold, info=info)

    def close(self) -> None:
        """Hold nothing."""

    def _by_its_scorer(self, answer: str | None) -> tuple[float, dict[str, str]]:
        """Return the data set's own score, and what its scorer raised."""
        data = self.task.data
        if answer is None or not scorable(answer, self.environment.solve(self.task) or ""):
            return 0.0, {}
        dataset = self.environment.dataset(data["dataset"], data["split"])
        # read the entry again: JSON may have lost types that a scorer needs
        entry = self.environment.entry(data["dataset"], data["split"], data["number"])
        try:
            with _own_randomness(0, 0), warnings.catch_warnings(action="ignore"):
                score = float(dataset.score_answer(answer, entry))
        except Exception as error:  # noqa: BLE001 -- scorers raise whatever an answer that they do not expect makes them raise
            return 0.0, {"scorer": f"{type(error).__name__}: {error}"[:200]}
        return (score, {}) if math.isfinite(score) else (0.0, {"scorer": f"gave {score}"})


def _round(weights: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Spread the sets over a round as evenly as their weights allow: at every position the one with the largest debt to its share."""
    debts, before = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    places = []
    for _ in range(sum(weights.values())):
        debts = {name: debts[name] + weight for name, weight in weights.items()}
        name = max(debts, key=lambda key: debts[key])
        debts[name] -= sum(weights.values())
        places.append((name, before[name]))
        before[name] += 1
    return tuple(places)


@contextmanager
def _own_randomness(*seed: int) -> Iterator[None]:
    """Seed the global random states, from which some data sets draw, and put back afterwards what they were."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    random.seed(f"{seed}")
    np.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def scorable(answer: str, due: str) -> bool:
    """Return False for an answer that would keep a scorer busy for hours: a number with a huge exponent, or far longer than what is due."""
    return len(answer) <= max(_LONGEST, 2 * len(due)) and _HUGE.search(answer) is None


def answer_in(text: str, pattern: str | None) -> str | None:
    """Return the answer that a text gives: the last match of the pattern, its first group where it has one; None without a match."""
    if pattern is None:
        return text
    matches = list(_compile_pattern(pattern).finditer(text))
    if not matches:
        return None
    return matches[-1].group(1 if matches[-1].re.groups else 0)


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise DataError(f"answer_pattern is no regular expression: {error}", remedy="Correct it") from error


def _plain(value: Any) -> Any:
    """Return an entry as JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return str(value)
