"""Parts of rewards reach the estimator that reads them: sample by sample, checked against the reward, and through a run of two rewards."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rl_runs import Rl, Seen

from skyrl_engine.errors import DataError, EngineError
from skyrl_engine.training.rl.reward_parts import parts_by_sample, parts_in
from skyrl_engine.training.rl.run import run_rl


def attempt(reward: float, **parts: float) -> Any:
    return SimpleNamespace(member=3, ticket=7, reward=reward, parts=parts)


def columns(*trajectories: int) -> Any:
    return SimpleNamespace(trajectory_ids=np.array(trajectories), sample_values={"turn": np.zeros(len(trajectories))})


def test_every_sample_of_an_attempt_has_its_parts() -> None:
    """The second attempt is two samples and has no part b, the third shows no parts: its reward is one of its own name."""
    made = parts_by_sample(columns(0, 1, 1, 2), [attempt(3.0, a=1.0, b=2.0), attempt(-1.0, a=-1.0), attempt(5.0)])
    found = parts_in(SimpleNamespace(sample_values={**made, "turn": np.zeros(4)}))
    assert list(found) == ["a", "b", "reward"]
    np.testing.assert_array_equal(found["a"], [1.0, -1.0, -1.0, np.nan])
    np.testing.assert_array_equal(found["b"], [2.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(found["reward"], [np.nan, np.nan, np.nan, 5.0])


def test_an_environment_without_parts_has_one_beside_those_of_reward_models() -> None:
    found = parts_in(SimpleNamespace(sample_values=parts_by_sample(columns(0), [attempt(3.0, judge=2.0)], {"judge"})))
    assert {name: values.tolist() for name, values in found.items()} == {"judge": [2.0], "reward": [1.0]}


def test_parts_that_are_not_the_reward_are_refused() -> None:
    with pytest.raises(DataError, match=r"attempt 3 of group 7 has the reward 1, and its parts \(a, b\) add up to 3"):
        parts_by_sample(columns(0), [attempt(1.0, a=1.0, b=2.0)])
    assert parts_by_sample(columns(0), [attempt(0.3, a=0.1, b=0.2)]), "rounding is no difference"


REWARDS = """
def letters(text, task):
    return sum(letter.isalpha() for letter in text)

def length(text, task):
    return -len(text) / 1000
"""


def test_a_run_normalises_each_reward_in_its_group(rl: Rl, seen: Seen, tmp_path: Path) -> None:
    """The definition once more, from the attempts' own parts; `advantage.weights` count after it."""
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + {n}"}) + "\n" for n in range(3)))
    rewards = f'[{{use="{tmp_path}/r.py:letters"}}, {{use="{tmp_path}/r.py:length"}}]'
    environment = f'environments=[{{use="function", data="{tmp_path}/tasks.jsonl", rewards={rewards}}}]'
    run_rl(rl("run", "rl.steps=1", environment, "advantage.use=gdpo", "advantage.weights={length=0.5}"))
    totals = []
    for group in seen.groups[1]:
        total = np.zeros(len(group.finished))
        for name, weight in (("letters", 1.0), ("length", 0.5)):
            values = np.array([own.parts[name] for own in group.finished])
            if np.ptp(values):
                total += weight * (values - values.mean()) / (values.std(ddof=1) + 1e-6)
        totals.append(total)
    due = np.concatenate(totals)
    due = due / (np.sqrt((due**2).sum() / (len(due) - 1)) + 1e-6)
    trained = seen.plans[1].columns
    got = trained.columns["advantages"]
    of_attempts = [got[trained.action_offsets[place]] for place in range(len(trained))]
    np.testing.assert_allclose(of_attempts, due, rtol=1e-5, atol=1e-6)
    assert np.ptp(due) > 0.5


@pytest.mark.parametrize("change", ["rl.kl={coef=0.1}", "rl.overlong={}", "rl.missing_eos_penalty=1", 'rl.truncated="zero_reward"'])
def test_what_no_part_shows_is_refused(rl: Rl, change: str) -> None:
    with pytest.raises(EngineError, match=r"reads the parts of rewards, which .* does not change"):
        run_rl(rl("run", "advantage.use=gdpo", change))
