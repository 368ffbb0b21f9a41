"""A tiny model, an environment of two turns, and runs by reinforcement over them: everything real, everything on CPU, in this process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rl_runs import Rl, Seen, write_world

from skyrl_engine.config import ResolvedConfig, load, resolve
from skyrl_engine.engine.plan import Plan
from skyrl_engine.rollout.group_source import RolloutSource, StepBatch
from skyrl_engine.training.rl.trainer import RlTrainer


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model/` and `world.py`, an environment of two turns."""
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def tables_of(world: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`tables_of("name")`: the tables of a run in `tmp_path / name`."""

    def make(
        name: str, *, preset: str = "grpo", folder: Path = world, environment: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        group_size = {} if preset == "ppo" else {"group_size": 3}
        return {
            "trainer": "rl",
            "model": {"path": str(folder / "model")},
            "rl": {"preset": preset, "steps": 2, "groups": 3, "max_tokens": 44, "max_prompt_tokens": 64, **group_size},
            "environments": [{"use": f"{folder / 'world.py'}:world", **(environment or {})}],
            "rollouts": {"workers": 1, "retries": 0},
            "evaluation": {"at_end": False},
            "optimizer": {"learning_rate": 1e-2},
            "run": {"directory": str(tmp_path / name), "device": "cpu", "seed": 5},
        }

    return make


@pytest.fixture
def rl(tables_of: Callable[..., dict[str, Any]]) -> Rl:
    """`rl("name", "key=value", ...)`: the resolved configuration of a run in `tmp_path / name`, with some keys changed."""

    def make(name: str = "run", *overrides: str, **fields: Any) -> ResolvedConfig:
        return resolve(load(tables_of(name, **fields), overrides))

    return make


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The batches of the runs of a test, just before they are learned from."""
    found = Seen()
    learn, trained = RlTrainer._learn, RolloutSource.take

    def watch_learn(self: RlTrainer, plan: Plan, number: int) -> Any:
        found.plans[number] = plan
        if found.also is not None:
            found.also(self, plan, number)
        return learn(self, plan, number)

    def take_step(self: RolloutSource, step: int) -> StepBatch:
        made = trained(self, step)
        found.groups[step] = made.groups
        return made

    monkeypatch.setattr(RlTrainer, "_learn", watch_learn)
    monkeypatch.setattr(RolloutSource, "take", take_step)
    return found
