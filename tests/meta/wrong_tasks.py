"""Environments whose tasks have one fault each."""

import os
import random

from attrs import evolve
from environment_of_sums import Plain
from wrong_episodes import TellsTheAnswer

from skyrl_engine.contracts import Task


class DuplicateKeys(Plain):
    def task(self, split, number):
        return evolve(super().task(split, number), key=f"{split}/{number // 2}")


class SharesKeys(Plain):
    def task(self, split, number):
        return evolve(super().task(split, number), key=str(number))


class SharesPrompts(Plain):
    """The held-out tasks are those to train on, under other keys."""

    def task(self, split, number):
        return evolve(super().task("train", number), key=f"{split}/{number}")


class HoldsOutWhatIsTrainedOn(Plain):
    """Every hundredth of its many tasks to train on is held out, under another key."""

    def tasks(self, split):
        numbers = range(10_000) if split == "train" else range(3, 10_000, 100)
        return [evolve(self.task("train", number), key=f"{split}/{number}") for number in numbers]


class TellsWhatIsHeldOut(TellsTheAnswer):
    """Its held-out prompts alone hold the solution."""

    def task(self, split, number):
        return super().task(split, number) if split == "eval" else Plain.task(self, split, number)


class Stream(Plain):
    """Draws its tasks one after the other, whatever number is asked for."""

    def tasks(self, split):
        return Drawn(self, split)


class Drawn:
    def __init__(self, environment, split):
        self.environment, self.split, self.generator = environment, split, random.Random(split == "train")

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return evolve(self.environment.task(self.split, self.generator.randrange(10**6)), key=f"{self.split}/{index}")


class HashedTasks(Plain):
    """Numbers that another process has otherwise."""

    def task(self, split, number):
        left = hash(f"{split}/{number}") % 10**9
        prompt = f"{left} + {self.first} ="
        return Task(f"{split}/{number}", ({"role": "user", "content": prompt},), data={"sum": left + self.first})


class TasksOfARank(Plain):
    """Every rank has tasks of its own."""

    def task(self, split, number):
        return super().task(split, number + 100 * int(os.environ.get("RANK", "0")))


class NoTasks(Plain):
    size = 0


class BothPrompts(Plain):
    def task(self, split, number):
        return evolve(super().task(split, number), prompt_ids=(1, 2))


class NoJson(Plain):
    def task(self, split, number):
        task = super().task(split, number)
        return evolve(task, data={**task.data, "seen": {1, 2}})


class NumbersAsKeys(Plain):
    """Its episodes look up what JSON has made a text."""

    def task(self, split, number):
        task = super().task(split, number)
        return evolve(task, data={**task.data, "steps": [{"worth": {0: 1, 1: 2}}]})


class ModelHasSpoken(Plain):
    def task(self, split, number):
        task = super().task(split, number)
        return evolve(task, messages=(*task.messages, {"role": "assistant", "content": "The answer is"}))


class LongPrompts(Plain):
    """Right, and longer than most models are given."""

    def task(self, split, number):
        task = super().task(split, number)
        return evolve(task, messages=({"role": "user", "content": "word " * 2000 + task.messages[0]["content"]},))


class HoldsALambda(Plain):
    def __init__(self):
        self.scale = lambda value: value


class OnlyTrains(Plain):
    """Knows the sums of the tasks to train on, and no others."""

    def open(self, task, seed):
        assert task.key.startswith("train"), "no such task"
        return super().open(task, seed)
