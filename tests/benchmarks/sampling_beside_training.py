"""Steps per hour of reinforcement with sampling beside training, against the two in turns. Environments answer after 0 to 2 seconds.

A Qwen3 of 10 million random weights in float32 attempts 4 tasks 4 times each in every step, 48 tokens an attempt; every attempt's environment
answers after a time of its own (exponential, mean 0.5 s, at most 2 s), which its seed decides, and each has a process. The same run, with the
generator `hf`:
- in turns (`rl.staleness = 0`), on the rank, and in a process of its own: the faster of the two is the baseline;
- beside training, with S = 1 and S = 3, in a process of its own.
All score the old policy before the update and correct by `tis`, as one does where samples are stale.

Every run has a process of its own, with one thread for the rank and one for the generator. The runs are taken one after the other, there and
back. A step's figure is wall time, from the end of the one before; the first steps, which wait for the first groups, are left out. Training
takes longer than sampling, so that it is the environments that are waited for, not the generator. Run with `nox -s bench`; about ten minutes.
"""

import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from attrs import define, field, frozen
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine, of_process
from measuring.words import VOCABULARY, write_words_model

from skyrl_engine import hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import StepFinished
from skyrl_engine.training.rl.run import run_rl

GROUPS, GROUP_SIZE, NEW = 4, 4, 48
WARM_UP, STEPS = 4, 16
BARS = {"beside training, S = 1": 1.7, "beside training, S = 3": 2.2}
"""Times the steps per hour of the faster run in turns."""

IDLE = 0.15
"""Share of a step of S = 3 in which training waits for groups."""

CONTROLLER = 0.03
"""Share of a step's CPU time that the threads take which sample beside training: ledger, queues, dispatch, journal and connections."""

SLOW = '''
"""An answer is worth its share of even words, and is judged after a time of its own."""
import time
import numpy as np
from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task


class Episode:
    def __init__(self, seed):
        self.seconds = min(2.0, float(np.random.default_rng(seed).exponential(0.5)))

    def begin(self):
        return ()

    def step(self, action):
        time.sleep(self.seconds)
        words = action.text.split()
        return StepResult(sum(word[-1] in "02468" for word in words) / max(1, len(words)))

    def close(self):
        pass


class Slow:
    claims = EnvironmentClaims(max_turns=1)

    def tasks(self, split):
        return [Task(str(n), messages=({"role": "user", "content": text},)) for n, text in enumerate(TEXTS if split == "train" else ())]

    def open(self, task, seed):
        return Episode(seed)


class Plugin:
    @hookimpl
    def skyrl_engine_make_environment(self, config, context):
        return Slow()


slow = Plugin()
'''

RUNS: Mapping[str, tuple[int, str]] = {
    "in turns, on the rank": (0, "rank"),
    "in turns, in a process": (0, "process"),
    "beside training, S = 1": (1, "process"),
    "beside training, S = 3": (3, "process"),
}


@frozen
class Course:
    """A run after its warm-up: seconds of a step, CPU seconds in it of all its processes and of the controller's threads beside training,
    seconds of training, the share of a step in which training waited, and the steps that groups were old, at most.
    """

    seconds: float
    cpu_seconds: float
    aside_seconds: float
    train_seconds: float
    waited: float
    staleness: float


@define
class Watch:
    """An observer that keeps the end of every step."""

    ends: list[float] = field(factory=list)
    cpu: list[float] = field(factory=list)
    aside: list[float] = field(factory=list)
    metrics: list[Mapping[str, float]] = field(factory=list)

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time() + sum(of_process(child.pid) for child in psutil.Process().children(recursive=True)))
        threads = psutil.Process().threads()
        self.aside.append(sum(thread.user_time + thread.system_time for thread in threads if thread.id != os.getpid()))
        self.metrics.append(event.metrics)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = write_words_model(directory / "model")
        numbers = np.random.default_rng(0)
        texts = [" ".join(f"w{word}" for word in numbers.integers(2, VOCABULARY, numbers.integers(12, 25))) for _ in range(64)]
        (directory / "slow.py").write_text(SLOW.replace("TEXTS", json.dumps(texts)))
        print(f"{machine()}, torch {torch.__version__}; Qwen3 of {parameters / 1e6:.1f}M parameters, float32")
        print(f"{GROUPS} x {GROUP_SIZE} attempts of {NEW} tokens a step; environments answer after 0 to 2 s, 0.5 s in the mean")
        courses: dict[str, list[Course]] = {run: [] for run in RUNS}
        context = multiprocessing.get_context("spawn")
        for run in (*RUNS, *reversed(RUNS)):
            with context.Pool(1) as pool:
                courses[run].append(pool.apply(measure, (directory, *RUNS[run])))
    report(courses)


def measure(directory: Path, staleness: int, placement: str) -> Course:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    watch = Watch()
    with tempfile.TemporaryDirectory() as run:
        table: dict[str, Any] = {
            "trainer": "rl",
            "model": {"path": str(directory / "model")},
            "environments": [{"use": f"{directory}/slow.py:slow"}],
            "generator": {"placement": placement},
            # an environment that waits holds its process
            "rollouts": {"workers": GROUPS * GROUP_SIZE},
            "rl": {
                "steps": WARM_UP + STEPS,
                "groups": GROUPS,
                "group_size": GROUP_SIZE,
                "max_tokens": NEW,
                "max_prompt_tokens": 64,
                "staleness": staleness,
                "old": "score",
            },
            "loss": {"corrections": [{"use": "tis"}]},
            "run": {"directory": f"{run}/run", "device": "cpu"},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
        }
        run_rl(resolve(from_dict(table, "benchmark")), observers=[watch])
    measured = watch.metrics[WARM_UP:]
    seconds = (watch.ends[-1] - watch.ends[WARM_UP - 1]) / STEPS
    return Course(
        seconds,
        (watch.cpu[-1] - watch.cpu[WARM_UP - 1]) / STEPS,
        (watch.aside[-1] - watch.aside[WARM_UP - 1]) / STEPS,
        sum(metrics["time/train"] for metrics in measured) / STEPS,
        sum(metrics.get("time/wait", 0.0) for metrics in measured) / STEPS / seconds,
        max(metrics.get("async/staleness_max", 0.0) for metrics in measured),
    )


def report(courses: Mapping[str, list[Course]]) -> None:
    seconds = {run: median(course.seconds for course in taken) for run, taken in courses.items()}
    for run, taken in courses.items():
        cpu, train = median(course.cpu_seconds for course in taken), median(course.train_seconds for course in taken)
        waited = median(course.waited for course in taken)
        print(
            f"{run}: {3600 / seconds[run]:.0f} steps an hour, {seconds[run]:.2f} s a step; {cpu:.2f} CPU s of all processes, {train:.2f} s of "
            f"training, groups at most {max(course.staleness for course in taken):.0f} steps old, {waited:.0%} of a step waiting for them"
        )
    baseline = min((run for run in RUNS if RUNS[run][0] == 0), key=lambda run: seconds[run])
    for run, bar in BARS.items():
        ratio = seconds[baseline] / seconds[run]
        print(f"{run}: {ratio:.2f} times the steps an hour of {baseline} {compare_with_bar(ratio, at_least=bar)}")
    for run in BARS:
        share = median(course.aside_seconds / course.cpu_seconds for course in courses[run])
        print(
            f"{run}: the controller's threads take {share:.1%} of a step's CPU time {compare_with_bar(share, at_most=CONTROLLER)}"
        )
    waited = median(course.waited for course in courses["beside training, S = 3"])
    print(f"beside training, S = 3: training waits {waited:.1%} of a step {compare_with_bar(waited, at_most=IDLE)}")


if __name__ == "__main__":
    main()
