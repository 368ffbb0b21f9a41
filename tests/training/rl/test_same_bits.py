"""A run's numbers and model bytes do not tell which attempts were in flight together: long rows of several turns, read by corrections.

Environments wait for other times in every run, one to seven workers answer, runs are killed inside generation. Whatever reads the sampler's own
log-probabilities, to their last bit, must come out the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_day import now
from rl_runs import Rl, Seen, kill_run, numbers_of, weights_of, write_world

from skyrl_engine.training.rl.run import run_rl

LONG = ("rl.steps=2", "checkpoint.every=1", "rl.groups=2", "rl.max_tokens=420")
READERS = {
    "tis": "loss.corrections=[{use='tis'}]",
    "rollout": "rl.old=rollout",
}
WAITING = {"turns": 4, "words": 50, "jitter": 0.02}


@pytest.fixture(scope="session")
def long_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world whose rows cross 192 tokens, from where on kernels of a CPU begin to differ by width."""
    return write_world(tmp_path_factory.mktemp("long"), max_position_embeddings=512, head_dim=16)


def compare(got: Path, wanted: Path) -> None:
    for one, other in zip(numbers_of(got), numbers_of(wanted), strict=True):
        assert one == other, {name: (one.get(name), other.get(name)) for name in other if one.get(name) != other[name]}
    assert weights_of(got) == weights_of(wanted)


@pytest.mark.proof
@pytest.mark.parametrize("reader", now(READERS, "tis"))
@pytest.mark.parametrize("workers", now([2, 3, 5, 7], 7))
def test_company_changes_no_bit(rl: Rl, long_world: Path, seen: Seen, reader: str, workers: int) -> None:
    keys = (*LONG, READERS[reader])
    one = run_rl(rl("one", *keys, folder=long_world, environment={**WAITING, "jitter": 0.0})).directory
    assert max(np.diff(plan.columns.token_offsets).max() for plan in seen.plans.values()) > 192, "rows too short to show anything"
    many = run_rl(rl("many", *keys, f"rollouts.workers={workers}", folder=long_world, environment=WAITING)).directory
    compare(many, one)


@pytest.mark.proof
@pytest.mark.parametrize("counts", now(["7", "3 11", "8 5"], "7"))
def test_kills_inside_generation_change_no_bit(
    rl: Rl, tables_of: Callable[..., dict[str, Any]], long_world: Path, counts: str
) -> None:
    keys = (*LONG, READERS["tis"])
    whole = run_rl(rl("whole", *keys, folder=long_world, environment=WAITING)).directory
    for count in map(int, counts.split()):
        kill_run(tables_of("parts", folder=long_world, environment=WAITING), (*keys, "rollouts.workers=4"), "sampling", count)
    parts = run_rl(rl("parts", *keys, "rollouts.workers=3", folder=long_world, environment=WAITING), resume=True).directory
    compare(parts, whole)
