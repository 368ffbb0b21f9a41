"""Bar B7: the cost of one call of an environment in a process of its own, alone and next to 64 episodes that hang.

Wall time per call, of several rounds the least. The machine should have nothing else to do. Run with `nox -s bench`.
"""

import tempfile
import time
from pathlib import Path

from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts import Action, FactoryContext, Task
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.rollout.env_pool import EpisodePool

MICROSECONDS_PER_CALL = 300.0
SLOWER_BESIDE_HANGING = 1.05
HANGING = 64
EPISODES, TURNS, ROUNDS = 16, 100, 7

ENVIRONMENT = """
import time
from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task

class Episode:
    def __init__(self, task):
        self.task = task
    def begin(self):
        if self.task.data.get("hang"):
            time.sleep(3600)
        return ()
    def step(self, action):
        return StepResult(0.5, done=False, messages=({"role": "user", "content": "A short observation of a few words."},))
    def close(self):
        pass

class Environment:
    claims = EnvironmentClaims(max_turns=1000)
    def tasks(self, split):
        return []
    def open(self, task, seed):
        return Episode(task)

class Plugin:
    @hookimpl
    def skyrl_engine_make_environment(self):
        return Environment()

plugin = Plugin()
"""


def await_answers(pool: EpisodePool, count: int) -> None:
    while count:
        count -= len(pool.poll(1.0))


def seconds_per_call(pool: EpisodePool, first: int) -> float:
    """The least of several rounds, each of some episodes side by side that take many turns of 50 tokens."""
    task = Task("one", prompt_ids=(1,))
    best = float("inf")
    for number in range(ROUNDS):
        episodes = range(first + number * EPISODES, first + (number + 1) * EPISODES)
        for handle in episodes:
            pool.open(handle, 0, task, seed=handle)
        await_answers(pool, EPISODES)
        begin = time.perf_counter()
        for turn in range(TURNS):
            for handle in episodes:
                pool.step(handle, Action("some words " * 20, tuple(range(50)), turn, "stop"))
            await_answers(pool, EPISODES)
        best = min(best, (time.perf_counter() - begin) / (EPISODES * TURNS))
        for handle in episodes:
            pool.close(handle)
    return best


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "environment.py"
        file.write_text(ENVIRONMENT)
        record = Registry.discover().resolve("environment", f"{file}:plugin", base=None)
        lock = SelectedPlugin.of(record, {}, "benchmark").to_lock_entry()
        pool = EpisodePool([lock], ["benchmark"], FactoryContext(), workers=1, timeout_s=3600.0)
        try:
            alone = seconds_per_call(pool, 10_000)
            for number in range(HANGING):
                pool.open(number, 0, Task("hanging", prompt_ids=(1,), data={"hang": True}), seed=number)
            begin = time.perf_counter()
            pool.open(5000, 0, Task("one", prompt_ids=(1,)), seed=0)
            await_answers(pool, 1)
            waited = time.perf_counter() - begin
            crowded = seconds_per_call(pool, 20_000)
            alone = min(alone, seconds_per_call(pool, 30_000)) if crowded < alone else alone
        finally:
            pool.shutdown()
    print(f"B7 dispatch: {1e6 * alone:.0f} us per call {compare_with_bar(1e6 * alone, at_most=MICROSECONDS_PER_CALL)}")
    longer = crowded / alone
    bar = compare_with_bar(longer, at_most=SLOWER_BESIDE_HANGING)
    print(f"B7 beside {HANGING} hanging episodes: {1e6 * crowded:.0f} us, {longer:.3f} times as long {bar}")
    print(f"behind {HANGING} episodes that hang the first answer came after {waited:.1f} s")


if __name__ == "__main__":
    main()
