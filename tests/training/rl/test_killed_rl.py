"""A run that is killed at any moment and resumed equals one that was not, byte for byte; nothing is trained twice or left out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rl_runs import MOMENTS, Rl, kill_run, numbers_of, weights_of

from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.training.rl.run import run_rl

TABLES = ("rl.steps=4", "checkpoint.every=1", "rl.kl={coef=0.3, target=0.01}", "rl.mini_batches=2")


@pytest.fixture
def check(rl: Rl, tables_of: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """`check((moment, count), ...)`: kill a run at each of these, resume it, and compare it with one that was never killed."""

    def make(*kills: tuple[str, int], environment: dict[str, Any], keys: Sequence[str] = TABLES, preset: str = "grpo") -> None:
        whole = run_rl(rl("whole", *keys, preset=preset, environment=environment)).directory
        for moment, count in kills:
            tables = tables_of("parts", preset=preset, environment=environment)
            kill_run(tables, (*keys, "rollouts.workers=2"), moment, count)
        parts = run_rl(rl("parts", *keys, preset=preset, environment=environment), resume=True).directory
        assert weights_of(parts) == weights_of(whole)
        for got, wanted in zip(numbers_of(parts), numbers_of(whole), strict=True):
            assert got == wanted, {name: (got.get(name), wanted.get(name)) for name in wanted if got.get(name) != wanted[name]}
        assert count_groups(parts) == count_groups(whole)
        assert sorted(count_groups(parts)) == list(range(len(count_groups(parts)))), "every ticket once, in one step"

    return make


def count_groups(directory: Path) -> dict[int, int]:
    return dict(read_index(directory / "rollouts").steps())


@pytest.mark.proof
def test_a_run_that_is_killed_three_times_equals_one_that_is_not(check: Callable[..., None]) -> None:
    check(("sampling", 9), ("a record half written", 8), ("publishing", 2), environment={})


@pytest.mark.proof
def test_a_run_on_pairs_of_attempts_that_is_killed_equals_one_that_is_not(check: Callable[..., None]) -> None:
    """Two optimizer steps of a batch, whose reference follows every other batch."""
    keys = (*TABLES[:2], "rl.mini_batches=2", "reference.refresh_every=2")
    check(("sampling", 9), ("learned", 2), environment={"failing": True}, keys=keys, preset="online_dpo")


@pytest.mark.nightly
@pytest.mark.parametrize("moment", [("sampling", 9), ("a step noted", 2), ("publishing", 3), ("a checkpoint's state", 3)], ids=str)
def test_a_run_that_is_killed_while_a_checkpoint_is_written_equals_one_that_is_not(
    check: Callable[..., None], moment: tuple[str, int]
) -> None:
    check(moment, (moment[0], 2), environment={"failing": True}, keys=(*TABLES, "checkpoint.asynchronous=true"))


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_moment_is_a_bad_one(check: Callable[..., None], moment: str) -> None:
    """The second time that it comes, in the second step or earlier, and again in what is left."""
    check((moment, 2), (moment, 2), environment={"failing": True})


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(17))
def test_random_moments(check: Callable[..., None], seed: int) -> None:
    """Three each: 51 kills."""
    draw = np.random.default_rng(seed)
    names = list(MOMENTS)
    kills = [(names[draw.integers(len(names))], int(draw.integers(1, 3))) for _ in range(3)]
    check(*kills, environment={"failing": True, "delay": True})
