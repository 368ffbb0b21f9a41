"""An environment that does what its tasks say, good or bad."""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task

FOREVER = 600
NOTHING = "nothing"
GO_ON = ({"role": "user", "content": "go on"},)


class WordlessError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Episode:
    def __init__(self, task, seed):
        self.data, self.seed, self.turns = task.data, seed, 0

    def begin(self):
        self.do("begin")
        return ({"role": "user", "content": f"seed {self.seed}"},)

    def step(self, action):
        self.turns += 1
        result = self.do(f"step {self.turns}", action)
        done = self.turns >= self.data.get("turns", 1)
        if result is NOTHING:
            return None
        return result if result is not None else StepResult(float(self.turns), done=done, messages=() if done else GO_ON)

    def do(self, moment, action=None):
        """Do what the task says for this moment; `once` names a file that says that it was done before."""
        if moment not in self.data or ("once" in self.data and Path(self.data["once"]).exists()):
            return None
        if "once" in self.data:
            Path(self.data["once"]).touch()
        return getattr(self, self.data[moment])(action)

    def hang(self, action):
        time.sleep(FOREVER)

    def take_a_while(self, action):
        time.sleep(0.6)

    def fail_later(self, action):
        """Fail, but not the first time."""
        seen = Path(self.data["seen"])
        if seen.exists():
            raise ValueError("not again")
        seen.touch()

    def spin(self, action):
        while True:
            pass

    def hang_in_a_coroutine(self, action):
        return asyncio.sleep(FOREVER)

    def fail(self, action):
        raise ValueError(f"no such word: {action and action.text}")

    def fail_at_length(self, action):
        raise ValueError("x" * 5_000_000)

    def fail_without_words(self, action):
        raise WordlessError

    def write_everywhere(self, action):
        """Write lines to descriptors that belong to others."""
        for descriptor in range(3, 4096):
            with suppress(OSError):
                os.write(descriptor, b"[]\n")

    def exit(self, action):
        os._exit(7)

    def leave(self, action):
        sys.exit(7)

    def die(self, action):
        os.kill(os.getpid(), signal.SIGKILL)

    def chat(self, action):
        for _ in range(50):
            os.write(1, b"x" * 10**6 + b"\n")
            print("and a line")

    def answer_much(self, action):
        return StepResult(1.0, info={"all": "x" * 2**25})

    def fork(self, action):
        """Fork, and let both go on; the child answers as well, unless it is kept from that."""
        if os.fork() == 0:
            return StepResult(-1.0)
        time.sleep(0.05)
        return None

    def start_others(self, action):
        import subprocess

        held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(self.data["pid"]).write_text(str(held.pid))
        time.sleep(FOREVER)

    def none(self, action):
        return NOTHING

    def text(self, action):
        return StepResult("much")

    def nan(self, action):
        return StepResult(float("nan"))

    def number(self, action):
        return 1.0

    def assistant(self, action):
        return StepResult(0.0, done=False, messages=({"role": "assistant", "content": "I"},))

    def no_json(self, action):
        return StepResult(0.0, info={"seen": {1, 2}})

    def numpy(self, action):
        import numpy as np

        return StepResult(np.float32(0.5), parts={"a": np.float64(0.5)}, metrics={"b": np.int64(3)})

    def numpy_everywhere(self, action):
        import numpy as np

        return StepResult(
            np.float64(1.5),
            done=np.True_,
            success=np.bool_(False),
            info={"count": np.int64(3), "all": np.arange(2)},
            token_rewards=np.full(len(action.token_ids), 0.5),
        )

    def more_than_float32(self, action):
        return StepResult(1e39)

    def fail_with_half_a_character(self, action):
        raise ValueError("cut here: \ud83d")

    def count_tokens(self, action):
        return StepResult(float(len(action.text)), token_rewards=tuple(0.5 for _ in action.token_ids))

    def another_each_time(self, action):
        return StepResult(time.time(), done=False, messages=GO_ON)

    def ask_for_much(self, action):
        return StepResult(0.0, done=False, messages=GO_ON, sampling={"max_tokens": "many"})

    def close(self):
        if "closed" in self.data:
            with Path(self.data["closed"]).open("a") as file:
                file.write("closed\n")
        match self.data.get("close"):
            case "fail":
                raise RuntimeError("will not close")
            case "hang":
                time.sleep(FOREVER)
            case "exit":
                os._exit(3)
            case "take_a_while":
                self.take_a_while(None)


class Naughty:
    claims = EnvironmentClaims(max_turns=10)

    def tasks(self, split):
        return [Task("one", prompt_ids=(1,))]

    def open(self, task, seed):
        return Episode(task, seed)


class Plugin:
    @hookimpl
    def skyrl_engine_make_environment(self):
        return Naughty()


class Impossible:
    @hookimpl
    def skyrl_engine_make_environment(self):
        if "skyrl_engine.rollout.episode_process" in sys.modules or "episode_process" in sys.argv[0]:
            raise ValueError("no licence")
        return Naughty()


class Vanishing:
    @hookimpl
    def skyrl_engine_make_environment(self):
        if "episode_process" in sys.argv[0]:
            os._exit(3)
        return Naughty()


naughty = Plugin()
impossible = Impossible()
vanishing = Vanishing()
