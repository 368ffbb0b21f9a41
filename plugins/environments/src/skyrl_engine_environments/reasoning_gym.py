"""`reasoning_gym`: the procedural data sets of reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), all of them by name."""

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

from attrs import define, field, frozen

from skyrl_engine import DataError
from skyrl_engine.contracts import Action, EnvironmentClaims, Message, Split, StepResult, Task, Tasks
from skyrl_engine_environments.options import ReasoningGymOptions
from skyrl_engine_environments.requirements import needed

_EVAL_SEED = 2**31 - 1
"""Seeds of held-out tasks count down from here, those of training tasks up from 0."""


@define(eq=False)
class ReasoningGymEnvironment:
    """Poses the questions of data sets and scores answers by their own scorers."""

    options: ReasoningGymOptions
    claims: EnvironmentClaims = field(init=False)
    _sets: dict[tuple[str, Split], Any] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        needed("reasoning_gym", "reasoning_gym")
        if self.options.answer_pattern is not None:
            _compiled(self.options.answer_pattern)
        self.claims = EnvironmentClaims(
            pass_threshold=self.options.pass_threshold, version=f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the data sets."""
        task = self.options.task
        return (task,) if isinstance(task, str) else tuple(task)

    def tasks(self, split: Split) -> Tasks:
        """Return the tasks of a split; sets are mixed in turn. Raises DataError for a set or an option that reasoning-gym does not have."""
        return ReasoningGymTasks(self, split, self.options.size if split == "train" else self.options.eval_size)

    def open(self, task: Task, seed: int) -> "ReasoningGymEpisode":  # noqa: ARG002 -- scoring draws nothing
        return ReasoningGymEpisode(self, task)

    def solve(self, task: Task) -> str | None:
        """Return the data set's own answer."""
        answer = task.data["entry"].get("answer")
        return None if answer is None else str(answer)

    def dataset(self, name: str, split: Split) -> Any:
        """Make, or return, a data set of a split."""
        key = (name, split)
        if key not in self._sets:
            self._sets[key] = self._made(name, split)
        return self._sets[key]

    def _made(self, name: str, split: Split) -> Any:
        from reasoning_gym.factory import DATASETS, create_dataset

        if name not in DATASETS:
            from difflib import get_close_matches

            near = get_close_matches(name, DATASETS, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(sorted(DATASETS))}"
            raise DataError(f"reasoning-gym has no data set {name!r}", remedy=remedy)
        given: Mapping[str, Any] = self.options.config
        own = given.get(name, {}) if len(self.names) > 1 else given
        size = self.options.size if split == "train" else self.options.eval_size
        seed = self.options.seed if split == "train" else _EVAL_SEED - self.options.seed
        try:
            return create_dataset(name, **{**own, "seed": seed, "size": size})
        except (TypeError, AssertionError, ValueError) as error:
            raise DataError(f"reasoning-gym's data set {name!r} refuses its options: {error}", remedy="Correct `config`") from error


@frozen(eq=False)
class ReasoningGymTasks:
    """Tasks of the sets in turn: task i is number i // sets of set i % sets."""

    environment: ReasoningGymEnvironment
    split: Split
    size: int

    def __attrs_post_init__(self) -> None:
        for name in self.environment.names:
            self.environment.dataset(name, self.split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        names = self.environment.names
        number, which = divmod(index, len(names))
        entry = self.environment.dataset(names[which], self.split)[number]
        data = {"dataset": names[which], "split": self.split, "number": number, "entry": _plain(entry)}
        return Task(f"{names[which]}/{self.split}/{number}", self.environment.options.messages(str(entry["question"])), data=data)


@define(eq=False)
class ReasoningGymEpisode:
    """One answer to one question."""

    environment: ReasoningGymEnvironment
    task: Task

    def begin(self) -> tuple[Message, ...]:
        return ()

    def step(self, action: Action) -> StepResult:
        """Score the answer."""
        options, data = self.environment.options, self.task.data
        answer = answer_in(action.text, options.answer_pattern)
        due = self.environment.solve(self.task)
        exact = answer is not None and due is not None and answer.strip() == due.strip()
        if options.exact:
            score = float(exact)
        else:
            dataset = self.environment.dataset(data["dataset"], data["split"])
            # the entry anew: what travelled as JSON may have lost types that a scorer looks at
            score = float(dataset.score_answer(answer, dataset[data["number"]])) if answer is not None else 0.0
        return StepResult(score, metrics={"exact": float(exact)}, success=score >= options.pass_threshold)

    def close(self) -> None:
        """Hold nothing."""


def answer_in(text: str, pattern: str | None) -> str | None:
    """Return the answer that a text gives: the last match of the pattern, its first group where it has one; None without a match."""
    if pattern is None:
        return text
    matches = list(_compiled(pattern).finditer(text))
    if not matches:
        return None
    return matches[-1].group(1 if matches[-1].re.groups else 0)


def _compiled(pattern: str) -> re.Pattern[str]:
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
