"""Environments that are odd, and right."""

import os
import random
import subprocess
import tempfile
from pathlib import Path

from attrs import evolve
from environment_of_sums import Episode, Plain, wrong
from wrong_comparisons import Longest

from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task


class AsynchronousEpisode(Episode):
    async def begin(self):
        return ()

    async def step(self, action):
        return super().step(action)

    async def close(self):
        super().close()


class SeededNoiseEpisode(Episode):
    """Random, and a function of the seed."""

    def begin(self):
        self.draw = random.Random(self.seed)
        return ({"role": "system", "content": f"Your number is {self.draw.randrange(100)}."},)

    def step(self, action):
        return evolve(super().step(action), metrics={"luck": self.draw.random()})


class NoisyJudgeEpisode(Episode):
    """A judge that is no function, and says so."""

    def step(self, action):
        return evolve(super().step(action), metrics={"judge": random.random()})


class NegativeRewardsEpisode(Episode):
    """Success is what it says, whatever the reward."""

    def step(self, action):
        right = self.worth(action.text) == 1.0
        return StepResult(-1.0 - len(action.text) / 10, success=right, info={"said": action.text[:10]})


class ProcessRewardsEpisode(Episode):
    """Pays by the token, in the parts as well."""

    def step(self, action):
        reward_of_token = self.worth(action.text) / len(action.token_ids)
        rewards = tuple(reward_of_token for _ in action.token_ids)
        return StepResult(0.0, token_rewards=rewards, parts={"steps": sum(rewards)})


class SetsTheNextTurnEpisode(Episode):
    def step(self, action):
        result = super().step(action)
        return result if result.done else evolve(result, sampling={"max_tokens": 4, "stop_strings": ["\n"]})


class WorksElsewhereEpisode(Episode):
    """Computes in a folder of its own, and comes back."""

    def step(self, action):
        before = Path.cwd()
        os.chdir(tempfile.gettempdir())
        try:
            return super().step(action)
        finally:
            os.chdir(before)


class EndsItsProcessEpisode(Episode):
    """Odd and right: computes in a process, and waits for it."""

    def step(self, action):
        subprocess.run(["true"], check=True)
        return super().step(action)


class RemembersTasks(Plain):
    """Makes every task once, and keeps it: what it keeps is a function of the number."""

    def tasks(self, split):
        tasks_by_split = self.__dict__.setdefault("kept", {})
        if split not in tasks_by_split:
            tasks_by_split[split] = super().tasks(split)
        return tasks_by_split[split]


class TokensAsPrompt(Plain):
    """Its prompts are tokens already, it holds nothing out, and a solution takes one turn each."""

    def tasks(self, split):
        return [] if split == "eval" else [self.task(split, number) for number in range(3)]

    def task(self, split, number):
        return Task(f"task {number}", prompt_ids=(5, number + 1), data={"sum": number})


class OneTask(Plain):
    """Trains on the task that it is evaluated on, and says so."""

    claims = EnvironmentClaims(max_turns=2, shared_tasks=True)
    size = 1

    def task(self, split, number):
        return super().task("train", number)


class TwoTurnSolutions(Plain):
    """The first answer must be a question."""

    def solve(self, task):
        return ("what?", str(task.data["sum"]))


class NobodyKnows(Plain):
    """Longer texts are better, and there is no right one."""

    solve = None


class RewardsAgainstTheMean(Longest):
    """A coroutine; the order of the attempts changes the last bits of the mean."""

    async def compare(self, task, attempts):
        values = [len(attempt.messages) + 0.1 * len(attempt.text) for attempt in attempts]
        mean = sum(values) / len(values)
        return [StepResult(value - mean, metrics={"place": place}) for place, value in enumerate(values)]


class MeetsTheNext(Longest):
    """Each meets the next one only, and it says so."""

    claims = EnvironmentClaims(pass_threshold=None, compares=True, order_matters=True)

    def values(self, lengths):
        return [float(own > other) for own, other in zip(lengths, lengths[1:] + lengths[:1], strict=True)]


Asynchronous = wrong(AsynchronousEpisode)


SeededNoise = wrong(SeededNoiseEpisode)


NoisyJudge = wrong(NoisyJudgeEpisode, claims=EnvironmentClaims(max_turns=2, random=True))


NegativeRewards = wrong(NegativeRewardsEpisode)


ProcessRewards = wrong(ProcessRewardsEpisode)


SetsTheNextTurn = wrong(SetsTheNextTurnEpisode)


EndsItsProcess = wrong(EndsItsProcessEpisode)
WorksElsewhere = wrong(WorksElsewhereEpisode)
