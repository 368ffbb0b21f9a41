"""Runs whose objective has terms and corrections: configured, reported, locked, refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import CheckpointError, DataError, UnsupportedError
from skyrl_engine.run.manifest import read_manifest
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import plan_sft, run_sft

Configure = Callable[..., ResolvedConfig]

ENTROPY = {"use": "entropy", "coef": 0.01}


def metrics(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == kind]


def test_contributions_add_up_to_the_loss_in_training_and_evaluation(configure: Configure) -> None:
    run = run_sft(configure(loss={"terms": [ENTROPY]}, training={"steps": 3})).directory
    for record in [*metrics(run, "step"), *metrics(run, "evaluation")]:
        assert record["objective/entropy"] < 0, "a positive coefficient raises the entropy"
        assert record["objective/cross_entropy"] + record["objective/entropy"] == pytest.approx(record["loss"], rel=1e-5)
    assert metrics(run, "evaluation")[-1]["objective/entropy"] > -0.01 * 5, "a mean in evaluation, not a sum over its passes"
    manifest = read_manifest(run / "run.json")
    assert manifest["plugins"]["loss.terms[0]"]["name"] == "entropy"
    assert manifest["config"]["loss"]["terms"] == [ENTROPY]


def test_a_term_without_weight_changes_nothing(configure: Configure) -> None:
    plain, with_term = (
        run_sft(configure(name, loss=loss, training={"steps": 3})).directory
        for name, loss in (("plain", {}), ("term", {"terms": [{**ENTROPY, "coef": 0.0}]}))
    )
    for kind in ("step", "evaluation"):
        losses = [record["loss"] for record in metrics(plain, kind)]
        # Not bit for bit: with entropy the head's gradient takes another way than the closed form of log-probabilities alone.
        assert [record["loss"] for record in metrics(with_term, kind)] == pytest.approx(losses, rel=1e-6)


def test_a_resumed_run_keeps_its_terms(configure: Configure) -> None:
    run_sft(configure("run", loss={"terms": [ENTROPY]}, training={"steps": 3}))
    with pytest.raises(CheckpointError) as caught:
        run_sft(configure("run", loss={"terms": []}, training={"steps": 6}, checkpoint={"resume": True}))
    assert caught.value.details[0].startswith("loss.terms[0]: skyrl-engine-losses:entropy (")
    assert caught.value.details[0].endswith(" -> none")


def test_a_correction_whose_column_is_missing_is_refused_while_planning(configure: Configure) -> None:
    with pytest.raises(DataError, match=r"has no column 'old_logprobs', which correction 'tis' of skyrl-engine-losses \S+ needs"):
        plan_sft(configure(loss={"corrections": [{"use": "tis"}]}))


def test_a_term_that_reads_values_needs_a_value_head(configure: Configure) -> None:
    with pytest.raises(UnsupportedError, match=r"loss 'value_clip' of .* needs the model's score 'values'"):
        plan_sft(configure(loss={"terms": [{"use": "value_clip", "coef": 0.5}]}))
