"""Rewards of this engine as one of `reward_funcs` of TRL's GRPOTrainer and RLOOTrainer (1.16)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from skyrl_engine.contracts.kinds.environment import EndedAttempt, Environment, Message, StepResult, Task
from skyrl_engine.errors import DataError, ResultError, UnsupportedError
from skyrl_engine.interop.environment_of_others import (
    bind_environment,
    make_task,
    refuse_several_turns,
    score_attempt,
    total_reward,
)
from skyrl_engine.interop.own_loop import await_value, wait_for
from skyrl_engine.interop.selection import NO_OPTIONS, Options

if TYPE_CHECKING:
    from skyrl_engine.registry.bound_plugin import BoundPlugin

OF_THE_TRAINER = ("trainer_state", "log_extra", "environments")
"""Arguments that TRL passes beside the columns of the dataset, and that no reward of ours reads."""


def trl_reward(environment: object, *, options: Options = NO_OPTIONS, num_generations: int | None = None) -> "TrlReward":
    """Return a reward function of TRL's trainers that rewards a completion as this environment rewards an attempt.

    `environment` is a name as in a configuration ("./mine.py:letters") or the plugin itself, such as what `@reward` and `@group_reward` make;
    its option `data` may be left out, since tasks are the trainer's rows. One that compares attempts needs
    `num_generations`, the trainer's own.

    Raises UnsupportedError for an environment of several turns, and for one that compares without `num_generations`, ConfigError for
    options, and what selecting a plugin raises.
    """
    bound = bind_environment(environment, options)
    refuse_several_turns(bound)
    if bound.product.claims.compares and (num_generations is None or num_generations < 2):
        raise UnsupportedError(
            f"{bound.label} compares the attempts at a task, and num_generations is {num_generations}",
            remedy="Say how many completions of a prompt the trainer samples: trl_reward(..., num_generations=8)",
        )
    return TrlReward(bound, bound.name, num_generations if bound.product.claims.compares else None)


@frozen(eq=False)
class TrlReward:
    """The product of `trl_reward`. `group_size` completions at a time are compared, or none (None)."""

    environment: "BoundPlugin[Environment]"
    __name__: str = field(alias="name")
    group_size: int | None

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return the reward of every completion. Prompts and completions are texts, or messages; the text of messages is the assistant's last.

        The columns of the dataset are `task.data`. Parts and metrics of the answers go to `log_metric`, as means. Raises DataError for lists of
        different lengths and for a part of a group, and what the environment raises.
        """
        rows = {name: values for name, values in columns.items() if name not in OF_THE_TRAINER}
        for name, values in {"completions": completions, **rows}.items():
            if len(values) != len(prompts):
                raise DataError(f"{len(values)} {name} for {len(prompts)} prompts", remedy="Give one per completion")
        tasks = [
            make_task(_read_prompt(prompt), {name: values[place] for name, values in rows.items()})
            for place, prompt in enumerate(prompts)
        ]
        texts = [_read_text(completion) for completion in completions]
        answers = wait_for(self._score(tasks, texts, completion_ids))
        if log_metric is not None:
            for name, value in _average_parts(answers).items():
                log_metric(f"{self.__name__}/{name}", value)
        rewards = [sum(total_reward(answer) for answer in own) for own in answers]
        return [float(reward) for reward in rewards]

    async def _score(
        self, tasks: Sequence[Task], texts: Sequence[str], completion_ids: Sequence[Sequence[int]] | None
    ) -> list[list[StepResult]]:
        ids: list[tuple[int, ...]] = [()] * len(tasks) if completion_ids is None else [tuple(own) for own in completion_ids]
        each = enumerate(zip(tasks, texts, ids, strict=True))
        alone = await asyncio.gather(
            *(score_attempt(self.environment, task, text, own, place) for place, (task, text, own) in each)
        )
        if self.group_size is None:
            return [[answer] for answer in alone]
        starts = range(0, len(tasks), self.group_size)
        compared = await asyncio.gather(*(self._compare(tasks, texts, start, self.group_size) for start in starts))
        return [[own, beside] for own, beside in zip(alone, (answer for group in compared for answer in group), strict=True)]

    async def _compare(self, tasks: Sequence[Task], texts: Sequence[str], start: int, size: int) -> Sequence[StepResult]:
        from skyrl_engine.registry.owner import blame

        members = tasks[start : start + size]
        if len(members) != size or any(task.key != members[0].key or task.messages != members[0].messages for task in members):
            raise DataError(
                f"{self.environment.label} compares {size} completions of a prompt, and those from number {start} are not of one",
                remedy="Let every process have whole groups: per_device_train_batch_size a multiple of num_generations",
            )
        attempts = [
            EndedAttempt(text, (*task.messages, {"role": "assistant", "content": text}))
            for task, text in zip(members, texts[start : start + size], strict=True)
        ]
        environment: Any = self.environment.product
        with blame(self.environment.owner, "a comparison"):
            answers = await await_value(environment.compare(members[0], attempts))
        if len(answers) != size or not all(isinstance(answer, StepResult) for answer in answers):
            raise ResultError(
                f"{self.environment.label} compared {size} attempts and returned {answers!r:.80}",
                remedy="Return one StepResult per attempt",
            )
        return list(answers)


def _read_prompt(prompt: Any) -> tuple[Message, ...]:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def _read_text(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    return str(said[-1] or "") if said else ""


def _average_parts(answers: Sequence[Sequence[StepResult]]) -> Mapping[str, float]:
    """Return the mean of each part and metric over the attempts that have it."""
    values: dict[str, list[float]] = {}
    for own in answers:
        for answer in own:
            for name, value in {**answer.parts, **answer.metrics}.items():
                values.setdefault(name, []).append(float(value))
    return {name: sum(own) / len(own) for name, own in values.items()}
