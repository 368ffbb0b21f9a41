"""Environments with one fault each, made from a right one: sums to answer, with a second chance; and odd ones without a fault."""

import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from attrs import evolve

from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task

AGAIN = ({"role": "user", "content": "Once more."},)


class Episode:
    """Two turns at most: a wrong first answer is given back."""

    def __init__(self, environment, task, seed):
        self.environment, self.task, self.seed = environment, task, seed
        self.said = []

    def begin(self):
        return ()

    def step(self, action):
        self.said.append(action.text)
        reward = self.worth(action.text)
        if reward == 1.0 or len(self.said) == 2:
            return StepResult(reward, parts={"right": reward})
        return StepResult(0.0, done=False, messages=AGAIN)

    def worth(self, text):
        return float(text.strip() == str(self.task.data["sum"]))

    def close(self):
        pass


class Plain:
    claims = EnvironmentClaims(max_turns=2)
    episode = Episode
    first = 10
    size = 50

    def tasks(self, split):
        return [self.task(split, number) for number in range(self.size)]

    def task(self, split, number):
        left = number + (0 if split == "train" else 1000)
        prompt = f"{left} + {self.first} ="
        return Task(f"{split}/{number}", ({"role": "user", "content": prompt},), data={"sum": left + self.first})

    def open(self, task, seed):
        return self.episode(self, task, seed)

    def solve(self, task):
        return str(task.data["sum"])


def wrong(episode, **more):
    """An environment of this class of episodes; importable by name, so that it can be pickled."""
    return type(episode.__name__.removesuffix("Episode"), (Plain,), {"episode": episode, "__module__": __name__, **more})


class SharedTurnsEpisode(Episode):
    def step(self, action):
        self.environment.turns = getattr(self.environment, "turns", 0) + 1
        if self.environment.turns % 2 == 0:
            return StepResult(self.worth(action.text), parts={})
        return StepResult(0.0, done=False, messages=AGAIN)


class TeachesEpisode(Episode):
    """Remembers in the environment what was answered, and says it to the next."""

    def begin(self):
        answers = self.environment.__dict__.setdefault("answers", [])
        answers.append(self.task.key)
        return ({"role": "user", "content": f"{len(answers)} have tried."},)


class GlobalRandomEpisode(Episode):
    def step(self, action):
        random.random()
        return super().step(action)


class RandomRewardEpisode(Episode):
    """Its noise is of the global random state."""

    def step(self, action):
        return evolve(super().step(action), reward=random.random(), parts={})


class OwnNoiseEpisode(Episode):
    """Its noise is drawn from a generator without a seed, which no global state knows of."""

    def step(self, action):
        return evolve(super().step(action), metrics={"noise": random.Random().random()})


class EndlessEpisode(Episode):
    def step(self, action):
        return StepResult(0.0, done=False, messages=AGAIN)


class TextRewardEpisode(Episode):
    def step(self, action):
        return evolve(super().step(action), reward="1.0")


class NanRewardEpisode(Episode):
    def worth(self, text):
        return 1.0 if super().worth(text) else float("nan")

    def step(self, action):
        return StepResult(self.worth(action.text))


class NumberResultEpisode(Episode):
    def step(self, action):
        return self.worth(action.text)


class TokenRewardsEpisode(Episode):
    """One reward per word, where one per token is due."""

    def step(self, action):
        return evolve(super().step(action), token_rewards=tuple(0.5 for _ in range(len(action.token_ids) + 1)), parts={})


class MutatesTaskEpisode(Episode):
    def step(self, action):
        self.task.data.setdefault("tries", []).append(action.turn)
        return super().step(action)


class PaysAnywhereEpisode(Episode):
    """Pays for the solution wherever it stands; see TellsTheAnswer."""

    def worth(self, text):
        return float(str(self.task.data["sum"]) in re.findall(r"\d+", text))


class TellsTheAnswer(Plain):
    """Its prompt holds the solution, and it pays for saying the prompt."""

    episode = PaysAnywhereEpisode

    def task(self, split, number):
        task = super().task(split, number)
        told = f"{task.messages[0]['content']} (known answers: {task.data['sum']}, 3)"
        return evolve(task, messages=({"role": "user", "content": told},))


class PaysNothingEpisode(Episode):
    def worth(self, text):
        return 0.9 * super().worth(text)

    def step(self, action):
        return StepResult(self.worth(action.text))


class PaysTheTurnBeforeEpisode(Episode):
    """The reward of a turn comes with the next one, and that of the last turn never."""

    def step(self, action):
        answer = super().step(action)
        before = self.worth(self.said[-2]) if len(self.said) > 1 else 0.0
        return evolve(answer, reward=before, parts={})


class PaysEmptyEpisode(Episode):
    """An empty answer is in every text."""

    def worth(self, text):
        return float(text.strip() in str(self.task.data["sum"]))


class SpeaksForTheModelEpisode(Episode):
    def step(self, action):
        result = super().step(action)
        return evolve(result, messages=({"role": "assistant", "content": "I think."}, *AGAIN)) if result.messages else result


class ContentOfPartsEpisode(Episode):
    def begin(self):
        return ({"role": "user", "content": [{"type": "text", "text": "Think."}]},)


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


class ClosesOnceEpisode(Episode):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held = {"server": 1}

    def close(self):
        del self.held["server"]


class ClosesWhatBeganEpisode(Episode):
    def begin(self):
        self.server = 1
        return ()

    def close(self):
        self.server += 1


class DoneWithMessagesEpisode(Episode):
    def step(self, action):
        return StepResult(self.worth(action.text), done=True, messages=({"role": "user", "content": "Thank you."},))


class GoesOnSilentlyEpisode(Episode):
    def step(self, action):
        result = super().step(action)
        return evolve(result, messages=())


class RaisesOnGarbageEpisode(Episode):
    def worth(self, text):
        return float(int(text) == self.task.data["sum"]) if text.strip().isascii() and text.strip() else 1 / len(text.strip())


class NeedsToolCallsEpisode(Episode):
    def step(self, action):
        assert action.tool_problem is None
        return super().step(action)


class PartsWithoutWeightsEpisode(Episode):
    def step(self, action):
        return evolve(super().step(action), parts={"right": 1.0, "short": 1.0})


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


class RaisesOnYesEpisode(Episode):
    """Answers what looks like a number, and what nobody expects, but not a word."""

    def worth(self, text):
        assert text not in ("yes", "no", "up"), "a number was expected"
        return super().worth(text)


class RaisesInTheSecondTurnEpisode(Episode):
    def step(self, action):
        assert action.turn == 0, "there is one turn"
        return super().step(action)


class OnlyTrains(Plain):
    """Knows the sums of the tasks to train on, and no others."""

    def open(self, task, seed):
        assert task.key.startswith("train"), "no such task"
        return super().open(task, seed)


class ChangesFolderEpisode(Episode):
    def begin(self):
        os.chdir(tempfile.gettempdir())
        return ()


class SetsVariablesEpisode(Episode):
    def begin(self):
        os.environ["ANSWER"] = str(self.task.data["sum"])
        return ()


class SetsAnAlarmEpisode(Episode):
    """A limit of time for what it computes; the handler stays."""

    def step(self, action):
        signal.signal(signal.SIGALRM, _give_up)
        return super().step(action)


def _give_up(_number, _frame):
    raise TimeoutError("it takes too long")


class SilencesNumPyEpisode(Episode):
    def step(self, action):
        np.seterr(all="ignore")
        return super().step(action)


class ServesOnAThreadEpisode(Episode):
    """A server of its own, which goes on when the episode is closed."""

    def begin(self):
        threading.Thread(target=time.sleep, args=(3,), daemon=True, name="server").start()
        return ()


class RaisesTheLimitEpisode(Episode):
    def begin(self):
        sys.setrecursionlimit(sys.getrecursionlimit() + 1000)
        return ()


class FreesAtTheEndEpisode(Episode):
    """Frees what it holds in its last turn, and once more when it is closed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held = {"server": 1}

    def step(self, action):
        result = super().step(action)
        if result.done:
            del self.held["server"]
        return result

    def close(self):
        if self.said:
            del self.held["server"]
            self.said = []


SharedTurns = wrong(SharedTurnsEpisode)
RaisesOnYes = wrong(RaisesOnYesEpisode)
RaisesInTheSecondTurn = wrong(RaisesInTheSecondTurnEpisode)
ChangesFolder = wrong(ChangesFolderEpisode)
SetsVariables = wrong(SetsVariablesEpisode)
SetsAnAlarm = wrong(SetsAnAlarmEpisode)
SilencesNumPy = wrong(SilencesNumPyEpisode)
ServesOnAThread = wrong(ServesOnAThreadEpisode)
RaisesTheLimit = wrong(RaisesTheLimitEpisode)
FreesAtTheEnd = wrong(FreesAtTheEndEpisode)
Teaches = wrong(TeachesEpisode)
GlobalRandom = wrong(GlobalRandomEpisode)
RandomReward = wrong(RandomRewardEpisode)
OwnNoise = wrong(OwnNoiseEpisode)
Endless = wrong(EndlessEpisode)
TextReward = wrong(TextRewardEpisode)
NanReward = wrong(NanRewardEpisode)
NumberResult = wrong(NumberResultEpisode)
TokenRewards = wrong(TokenRewardsEpisode)
MutatesTask = wrong(MutatesTaskEpisode)
PaysNothing = wrong(PaysNothingEpisode)
PaysTheTurnBefore = wrong(PaysTheTurnBeforeEpisode)
PaysEmpty = wrong(PaysEmptyEpisode)
SpeaksForTheModel = wrong(SpeaksForTheModelEpisode)
ContentOfParts = wrong(ContentOfPartsEpisode)
ClosesOnce = wrong(ClosesOnceEpisode)
ClosesWhatBegan = wrong(ClosesWhatBeganEpisode)
DoneWithMessages = wrong(DoneWithMessagesEpisode)
GoesOnSilently = wrong(GoesOnSilentlyEpisode)
RaisesOnGarbage = wrong(RaisesOnGarbageEpisode)
NeedsToolCalls = wrong(NeedsToolCallsEpisode)
PartsWithoutWeights = wrong(PartsWithoutWeightsEpisode)


# --- odd ones, all of them right -----------------------------------------------------------------------------------------------------


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
        each = self.worth(action.text) / len(action.token_ids)
        given = tuple(each for _ in action.token_ids)
        return StepResult(0.0, token_rewards=given, parts={"steps": sum(given)})


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


class RemembersTasks(Plain):
    """Makes every task once, and keeps it: what it keeps is a function of the number."""

    def tasks(self, split):
        kept = self.__dict__.setdefault("kept", {})
        if split not in kept:
            kept[split] = super().tasks(split)
        return kept[split]


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


Asynchronous = wrong(AsynchronousEpisode)
SeededNoise = wrong(SeededNoiseEpisode)
NoisyJudge = wrong(NoisyJudgeEpisode, claims=EnvironmentClaims(max_turns=2, random=True))
NegativeRewards = wrong(NegativeRewardsEpisode)
ProcessRewards = wrong(ProcessRewardsEpisode)
SetsTheNextTurn = wrong(SetsTheNextTurnEpisode)
WorksElsewhere = wrong(WorksElsewhereEpisode)
