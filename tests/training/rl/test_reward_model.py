"""`[reward_model]`: a frozen classifier whose value at the end of an attempt is a part of its reward."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rl_runs import Rl, Seen
from safetensors.numpy import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ConfigError, ModelError, UnsupportedError
from skyrl_engine.modeling.classifier import become_classifier
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.rollout.turns import TurnRenderer
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.reward_model.trainer import plan_reward_model
from skyrl_engine.training.rl.preparation import prepare
from skyrl_engine.training.rl.trainer import run_rl


@pytest.fixture(scope="module")
def judge(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model with the tokenizer of the trained one."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    write_model(folder, "llama", value_head=True, tokenizer=tokenizer)
    tokenizer.save_pretrained(folder)
    become_classifier(folder, ModelConfig(str(folder), value_head=True, classifier=True), tokenizer.pad_token_id)
    return folder


def steps(directory: Path) -> list[dict[str, float]]:
    return [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def test_the_value_at_the_end_of_an_attempt_is_a_part_of_its_reward(rl: Rl, seen: Seen, judge: Path) -> None:
    """Each attempt's share is half of the score that transformers gives its last text, closed as the template closes it."""
    resolved = rl("run", "rl.steps=1", f"reward_model.path={judge}", "reward_model.weight=0.5")
    (metrics,) = steps(run_rl(resolved).directory)
    classifier = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    closing = TurnRenderer(AutoTokenizer.from_pretrained(judge)).closing()
    attempts = [each for group in seen.groups[1] for each in group.finished]
    scores = []
    for each in attempts:
        ids = each.token_ids[int(each.segment_offsets[:-1][each.kinds == 0][-1]) :].tolist()
        if closing is not None and ids[-1] == closing[0]:
            ids += closing[1].tolist()
        with torch.no_grad():
            scores.append(classifier(torch.tensor([ids])).logits.item())
    assert np.std(scores) > 0.01
    assert metrics["reward/model_mean"] == pytest.approx(np.mean(scores), abs=1e-5)
    assert metrics["reward/model_max"] == pytest.approx(np.max(scores), abs=1e-5)
    assert metrics["reward/part/reward_model"] == pytest.approx(np.mean(scores) / 2, abs=1e-5)
    columns = seen.plans[1].columns
    trained = np.bincount(columns.trajectory_ids, weights=np.add.reduceat(columns.columns["rewards"], columns.action_offsets[:-1]))
    due = [each.reward + score / 2 for each, score in zip(attempts, scores, strict=True)]
    np.testing.assert_allclose(trained, due, atol=1e-5)
    assert metrics["reward/mean"] == pytest.approx(np.mean(due), abs=1e-5)


def test_a_resumed_run_has_the_same_bits_and_an_evaluation_the_models_part(rl: Rl, judge: Path) -> None:
    keys = (f"reward_model.path={judge}", "evaluation.every=1", "evaluation.tasks=2", "evaluation.samples=1")
    whole = run_rl(rl("whole", *keys)).directory
    cut = rl("cut", "rl.steps=1", *keys)
    run_rl(cut)
    run_rl(rl("cut", *keys), resume=True)
    saved = [load_file(each / "model" / "model.safetensors") for each in (whole, whole.parent / "cut")]
    assert {name: each.tobytes() for name, each in saved[0].items()} == {name: each.tobytes() for name, each in saved[1].items()}
    plain = run_rl(rl("plain", "evaluation.every=1", "evaluation.tasks=2", "evaluation.samples=1", "rl.steps=1")).directory
    found = [
        next(record["metrics"] for record in read_metrics(each / "metrics.jsonl") if record["kind"] == "evaluation")[
            "evaluation/avg@1"
        ]
        for each in (whole, plain)
    ]
    assert found[0] != found[1]
    assert steps(whole)[1]["reward/model_mean"] == steps(whole.parent / "cut")[1]["reward/model_mean"]


def test_what_cannot_work_is_refused_while_planning(rl: Rl, world: Path, judge: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no sequence classifier"):
        prepare(rl("run", f"reward_model.path={world / 'model'}"))
    with pytest.raises(ModelError, match="the reward model cannot be used"):
        prepare(rl("run", "reward_model.path=./nowhere"))
    with pytest.raises(UnsupportedError, match="group_filters look at rewards before"):
        prepare(rl("run", f"reward_model.path={judge}", 'group_filters=[{use="zero_variance"}]'))
    with pytest.raises(ConfigError, match=r"reward_model\.preset"):
        prepare(rl("run", "reward_model.preset=none"))
    several = shutil.copytree(judge, tmp_path / "several")
    stated = json.loads((several / "config.json").read_text())
    (several / "config.json").write_text(json.dumps({**stated, "id2label": {"0": "no", "1": "yes"}}))
    with pytest.raises(ModelError, match="with 2 labels, and a reward is one number"):
        prepare(rl("run", f"reward_model.path={several}"))
    other = tmp_path / "other"
    tokenizer = write_tokenizer(other, ["another text"])
    write_model(other, value_head=True, tokenizer=tokenizer)
    become_classifier(other, ModelConfig(str(other), value_head=True, classifier=True), tokenizer.pad_token_id)
    with pytest.raises(UnsupportedError, match="has another tokenizer than the trained model"):
        prepare(rl("run", f"reward_model.path={other}"))
    tables: dict[str, Any] = {
        "trainer": "reward_model",
        "model": {"path": str(judge)},
        "data": {"train": str(tmp_path / "pairs.jsonl")},
        "reward_model": {"path": "m"},
    }
    with pytest.raises(ConfigError, match="is of trainer rl"):
        plan_reward_model(resolve(from_dict(tables, "test")))
