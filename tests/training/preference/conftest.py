"""Runs of trainer preference over pairs of right and wrong sums."""

from pathlib import Path

import pytest
from pair_runs import Configure, runs_over, write_pairs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model/`, `train.jsonl`, `eval.jsonl` and `single.jsonl`."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def configure(pairs: Path, tmp_path: Path) -> Configure:
    """`configure("name", table={key: value})`: a run of six steps of four pairs in `tmp_path / name`, with some keys changed."""
    return runs_over(pairs, "preference", tmp_path)
