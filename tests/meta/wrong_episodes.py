"""Environments whose episodes have one fault each."""

import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time

import numpy as np
from attrs import evolve
from environment_of_sums import AGAIN, Episode, Plain, wrong

from skyrl_engine.contracts import StepResult


class HeldOutForNobodyEpisode(Episode):
    """Knows the answers to the tasks to train on."""

    def worth(self, text):
        return super().worth(text) if self.task.key.startswith("train") else 0.0


class ReadsAnyNumberEpisode(Episode):
    """Python reads no number of more than 4,300 digits."""

    def worth(self, text):
        return float(text.strip().isdecimal() and int(text) == self.task.data["sum"])


class ReadsFloatsEpisode(Episode):
    """Nearer is better, and "nan" is a number to Python."""

    def worth(self, text):
        try:
            return 1 / (1 + abs(float(text) - self.task.data["sum"]))
        except (ValueError, OverflowError):
            return 0.0


class ReadsJsonEpisode(Episode):
    """Deep nesting is no JSONDecodeError."""

    def worth(self, text):
        try:
            return float(json.loads(text[: 2**18]) == self.task.data["sum"])
        except ValueError:
            return 0.0


class AsksTheSilentEpisode(Episode):
    """Asks for ever who says nothing."""

    def step(self, action):
        if not action.text.strip():
            return StepResult(0.0, done=False, messages=AGAIN)
        return super().step(action)


class LeavesAProcessEpisode(Episode):
    """A sandbox that nobody ends."""

    def step(self, action):
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "3")
        return super().step(action)


class SetInInfoEpisode(Episode):
    def step(self, action):
        return evolve(super().step(action), info={"said": set(self.said)})


class SuccessAsTextEpisode(Episode):
    def step(self, action):
        return evolve(super().step(action), success="yes")


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


class RunningMeanEpisode(Episode):
    """Takes the mean of all rewards that the environment gave from each."""

    def worth(self, text):
        rewards = self.environment.__dict__.setdefault("rewards", [])
        reward = super().worth(text)
        rewards.append(reward)
        return reward - sum(rewards) / len(rewards)


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


class SingleRewardEpisode(Episode):
    def step(self, action):
        return evolve(super().step(action), reward=np.float32(self.worth(action.text)))


class NumberResultEpisode(Episode):
    def step(self, action):
        return self.worth(action.text)


class TokenRewardsEpisode(Episode):
    """One reward per word, where one per token is due."""

    def step(self, action):
        return evolve(super().step(action), token_rewards=tuple(0.5 for _ in range(len(action.token_ids) + 1)), parts={})


class UnclaimedColumnEpisode(Episode):
    """Gives numbers per token that its environment's claims do not name."""

    def step(self, action):
        return evolve(super().step(action), columns={"teacher_logprobs": tuple(-0.5 for _ in action.token_ids)})


class MutatesTaskEpisode(Episode):
    def step(self, action):
        self.task.data.setdefault("tries", []).append(action.turn)
        return super().step(action)


class PaysAnywhereEpisode(Episode):
    """Pays for the solution wherever it occurs; see TellsTheAnswer."""

    def worth(self, text):
        return float(str(self.task.data["sum"]) in re.findall(r"\d+", text))


class TellsTheAnswer(Plain):
    """Its prompt holds the solution, and it pays for saying the prompt."""

    episode = PaysAnywhereEpisode

    def task(self, split, number):
        task = super().task(split, number)
        question = f"{task.messages[0]['content']} (known answers: {task.data['sum']}, 3)"
        return evolve(task, messages=({"role": "user", "content": question},))


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


class RaisesOnYesEpisode(Episode):
    """Answers what looks like a number, and what nobody expects, but not a word."""

    def worth(self, text):
        assert text not in ("yes", "no", "up"), "a number was expected"
        return super().worth(text)


class RaisesInTheSecondTurnEpisode(Episode):
    def step(self, action):
        assert action.turn == 0, "there is one turn"
        return super().step(action)


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


HeldOutForNobody = wrong(HeldOutForNobodyEpisode)
RunningMean = wrong(RunningMeanEpisode)
ReadsAnyNumber = wrong(ReadsAnyNumberEpisode)
ReadsFloats = wrong(ReadsFloatsEpisode)
ReadsJson = wrong(ReadsJsonEpisode)
AsksTheSilent = wrong(AsksTheSilentEpisode)
LeavesAProcess = wrong(LeavesAProcessEpisode)
SetInInfo = wrong(SetInInfoEpisode)
SuccessAsText = wrong(SuccessAsTextEpisode)
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


SingleReward = wrong(SingleRewardEpisode)


TokenRewards = wrong(TokenRewardsEpisode)
UnclaimedColumn = wrong(UnclaimedColumnEpisode)


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
