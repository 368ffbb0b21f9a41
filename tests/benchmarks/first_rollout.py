"""Bar B8: CPU seconds of `skyrl-engine rl --help`, and of a run by reinforcement from its launch to its first rollouts.

Run with `nox -s bench`. The model is tiny, and a step is one task of reasoning-gym attempted twice, so that what counts is starting: the
interpreter, imports, the configuration, model and backend, the proof that sampling is right, the environment's own process. CPU time of all
processes, compiled once, least of several runs.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model

RUNS = 5
HELP_SECONDS, ROLLOUT_SECONDS = 0.25, 6.0

ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}, "HF_HUB_OFFLINE": "1"}
"""As for an installed engine, whose modules were compiled by pip."""

OBSERVER = '''
import os
import time
from pathlib import Path

from attrs import define

from skyrl_engine import hookimpl


@define
class Options:
    into: str


class Clock:
    """Writes the CPU seconds of this process and of its children, the living ones too, when the first rollouts are there."""

    def __init__(self, into):
        self.into = Path(into)

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event):
        spent = time.process_time() + os.times().children_user + os.times().children_system
        for thread in Path("/proc/self/task").iterdir():
            for child in (thread / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                spent += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        if not self.into.exists():
            self.into.write_text(repr(spent))


class Plugin:
    @hookimpl
    def skyrl_engine_config_schema(self):
        return Options

    @hookimpl
    def skyrl_engine_make_observer(self, config):
        return Clock(config.into)


clock = Plugin()
'''


def main() -> None:
    program = str(Path(sys.executable).with_name("skyrl-engine"))
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        helped = min(cpu_seconds([program, "rl", "--help"], directory) for _ in range(RUNS))
        print(f"skyrl-engine rl --help: {helped:.3f} CPU s {compare_with_bar(helped, at_most=HELP_SECONDS)}")
        make_model(
            directory / "model", [Exchange(f"Spell {word} backward", word[::-1]) for word in ("one", "two", "three", "four")]
        )
        (directory / "observer.py").write_text(OBSERVER)
        started = [first_rollouts(program, directory, number) for number in range(RUNS)]
        print(
            f"launch to first rollouts: {min(started):.2f} CPU s {compare_with_bar(min(started), at_most=ROLLOUT_SECONDS)}",
            end="; ",
        )
        print(f"runs {', '.join(f'{seconds:.2f}' for seconds in started)}")


def first_rollouts(program: str, directory: Path, number: int) -> float:
    """CPU seconds of all processes of a run until its first rollouts are there."""
    spent, output = directory / f"spent-{number}", directory / f"run-{number}"
    step = [
        "--env",
        "reasoning_gym:spell_backward",
        "--steps",
        "1",
        "--groups",
        "1",
        "--group-size",
        "2",
        "--max-tokens",
        "16",
        "rl.max_prompt_tokens=256",
    ]
    observer = [f'run.observers=["{directory}/observer.py:clock"]', f"observers.clock.into={spent}"]
    rest = ["run.device=cpu", "checkpoint.at_end=false", "evaluation.at_end=false", *observer]
    cpu_seconds([program, "rl", "--quiet", "--model", str(directory / "model"), "--output", str(output), *step, *rest], directory)
    return float(spent.read_text())


def cpu_seconds(command: Sequence[str], directory: Path) -> float:
    """User and system time of one process; SystemExit, with what it said, where it fails."""
    with (directory / "said").open("w+b") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{output.read().decode()}\n{' '.join(command)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
