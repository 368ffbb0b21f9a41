"""A loss function of another engine's form, named on the command line as a file, trains as the native one does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import ContractError
from skyrl_engine.training.sft.trainer import run_sft

THEIRS = """
from skyrl_engine.interop import masked_loss


def theirs(log_probs, loss_mask, scale=1.0):
    loss = -log_probs * scale
    return {reduction}, {{"nll": (loss * loss_mask).sum() / loss_mask.sum()}}


adapted = masked_loss(theirs, config={{"scale": 1.0}})
"""


def losses(directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["metrics"]["loss"] for row in rows if row["kind"] == "step"]


def test_it_trains_as_the_native_loss_does(configure: Callable[..., ResolvedConfig], tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(THEIRS.format(reduction="(loss * loss_mask).sum()"))
    short = {"training": {"steps": 3}, "checkpoint": {"every": None, "at_end": False}}
    native = run_sft(configure(run={"directory": str(tmp_path / "native")}, **short))
    adapted = run_sft(
        configure(
            run={"directory": str(tmp_path / "adapted")}, loss={"use": f"{tmp_path}/my_loss.py:adapted", "scale": 1.0}, **short
        )
    )
    expected = losses(native.directory)
    assert losses(adapted.directory) == pytest.approx(expected, rel=1e-6)  # float32, other kernels for the same numbers
    assert adapted.metrics["nll"] == pytest.approx(expected[-1], rel=1e-6)


def test_a_masked_mean_ends_the_run_with_its_cause(configure: Callable[..., ResolvedConfig], tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(THEIRS.format(reduction="(loss * loss_mask).sum() / loss_mask.sum()"))
    with pytest.raises(ContractError, match=r"theirs cannot be used as it is: it divides by its own mask") as raised:
        run_sft(configure(loss={"use": f"{tmp_path}/my_loss.py:adapted"}))
    assert raised.value.exit_code == 3
