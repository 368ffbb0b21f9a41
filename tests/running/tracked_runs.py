"""A run as trackers are told it: killed with SIGKILL after step 5, resumed from the checkpoint of step 4, ended after step 6."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.observer import SessionStarted
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.run.metrics import MetricsJsonl
from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.testing.observers.sessions import Event, ToldSession, method_of

TOTAL, CHECKPOINT, KILLED = 6, 4, 5
SECRETS = ("sk-in-a-key", "in-a-url", "in-a-query", "in-the-environment")
CONFIG: dict[str, Any] = {
    "trainer": "rl",
    "run": {"report": True, "seed": 3},
    "optimizer": {"learning_rate": 0.25},
    "environments": [{"use": "prompts", "url": "https://me:in-a-url@host/v1?token=in-a-query"}],
    "generator": {"use": "openai", "api_key": "sk-in-a-key", "api_key_env": "MY_TOKEN", "model": "of in-the-environment"},
}
NUMBERS = (("loss", 0.5), ("reward/mean", float("nan")), ("evaluation/avg@1", 0.0))
"""Metrics of step 0; every step adds its number. One is never finite, one has a character that not every tracker takes."""


def list_events(directory: Path, start: int, end: int, *, killed: bool = False) -> Iterator[Event]:
    """Yield the events of a session, whose manifest holds secrets."""
    for event in ToldSession(TOTAL, start, end, NUMBERS, rollouts=True, killed=killed).events(directory):
        yield evolve(event, manifest={**event.manifest, "config": CONFIG}) if isinstance(event, SessionStarted) else event


def make(name: str, options: Mapping[str, Any]) -> Any:
    """Make an installed observer with options, as a run does."""
    return SelectedPlugin.of(Registry.discover().resolve("observer", name), options, "test").make(FactoryContext(seed=0))


def tell_session(name: str, options: Mapping[str, Any], directory: Path, start: int, end: int, *, killed: bool = False) -> None:
    """Tell a tracker a session; its failures are raised."""
    bus = ObserverBus([MetricsJsonl(), make(name, options)], on_error="stop")
    for event in list_events(directory, start, end, killed=killed):
        method_of(bus, event)(event)


def tell_killed_and_resumed(name: str, options: Mapping[str, Any], directory: Path) -> None:
    """Tell a tracker the run, its first session in a process that is killed."""
    os.environ["MY_TOKEN"] = "in-the-environment"
    directory.mkdir(exist_ok=True)
    code = f"import tracked_runs; tracked_runs.tell_and_die({name!r}, {json.dumps(options)!r}, {str(directory)!r})"
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    # a service of W&B that this process has would be the other's too, and live on
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | {"PYTHONPATH": search}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    tell_session(name, options, directory, CHECKPOINT, TOTAL)


def tell_and_die(name: str, options: str, directory: str) -> None:
    tell_session(name, json.loads(options), Path(directory), 0, KILLED, killed=True)
    os.kill(os.getpid(), signal.SIGKILL)


def assert_no_secret(folder: Path) -> None:
    """Hold that no file under a folder has one of the secrets in it."""
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not [secret for secret in SECRETS if secret.encode() in content], file
