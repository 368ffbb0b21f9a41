"""`[reward_model]`: a frozen classifier whose value at the end of an attempt is a part of its reward."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rl_runs import Rl, Seen, kill_run, numbers_of, weights_of
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from skyrl_engine.config import from_dict, load, resolve
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import ConfigError, ContractError, ModelError, UnsupportedError
from skyrl_engine.modeling.classifier import become_classifier
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.journal_index import read_groups
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.rollout_cases import plain_group
from skyrl_engine.training.reward_model.trainer import plan_reward_model
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.reward_model import REWARD_MODEL
from skyrl_engine.training.rl.run import run_rl


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
    closing = ChatRenderer(AutoTokenizer.from_pretrained(judge)).closing()
    attempts = [trajectory for group in seen.groups[1] for trajectory in group.finished]
    scores = []
    for trajectory in attempts:
        ids = trajectory.token_ids[int(trajectory.segment_offsets[:-1][trajectory.kinds == 0][-1]) :].tolist()
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
    earned = [float(trajectory.rewards.sum()) for trajectory in attempts]
    assert np.std(earned) > 0
    expected = [reward + score / 2 for reward, score in zip(earned, scores, strict=True)]
    np.testing.assert_allclose(trained, expected, atol=1e-5)
    assert metrics["reward/mean"] == pytest.approx(np.mean(expected), abs=1e-5)


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


def test_filters_and_the_journal_see_the_whole_reward(rl: Rl, judge: Path, tmp_path: Path) -> None:
    """A run drops the groups whose whole reward is above the median of another run's, which drops none, and samples others in their place."""
    keys = ("rl.steps=1", "rl.groups=4", f"reward_model.path={judge}", "reward_model.weight=50.0")
    plain = run_rl(rl("plain", *keys)).directory
    before = {group.ticket: means(group) for group in read_groups(plain / "rollouts")}
    by_model = {ticket: model for ticket, (_, model) in before.items()}
    bound = float(np.median([whole for whole, _ in before.values()]))
    assert np.std(list(by_model.values())) > 1, "the model decides"
    directory = run_rl(rl("filtered", *keys, f'group_filters=[{{use="reward_range", high={bound}}}]')).directory
    recorded = {group.ticket: group for group in read_groups(directory / "rollouts")}
    for ticket, group in recorded.items():
        whole, model = means(group)
        assert group.dropped == ("too_high" if whole > bound else None)
        assert (whole, model) == before.get(ticket, (whole, model)), "a group's value does not depend on what ended with it"
    assert sum(group.dropped is None for group in recorded.values()) >= 4
    assert sum(group.dropped is not None for group in recorded.values()) >= 2
    (metrics,) = steps(directory)
    trained = [model for group in recorded.values() if group.dropped is None for _, model in [means(group)]]
    assert metrics["reward/part/reward_model"] == pytest.approx(np.mean(trained))
    assert metrics["reward/part/reward_model"] == pytest.approx(50 * metrics["reward/model_mean"])
    assert metrics["reward/mean"] <= bound


def means(group: Group) -> tuple[float, float]:
    """Mean of a group's rewards, and of the reward model's part in them."""
    return float(np.mean([trajectory.reward for trajectory in group.finished])), float(
        np.mean([trajectory.parts[REWARD_MODEL] for trajectory in group.finished])
    )


def test_recorded_rollouts_are_valued_anew(rl: Rl, judge: Path, tables_of: Callable[..., dict[str, Any]]) -> None:
    """The recorded part of a reward model is replaced, not doubled: with the same model, the same step."""
    keys = ("rl.steps=1", "rl.old=current", f"reward_model.path={judge}")
    online = run_rl(rl("online", *keys)).directory
    tables = tables_of("offline")
    del tables["environments"]
    tables["rl"]["rollouts"] = str(online)
    again = run_rl(resolve(load(tables, keys))).directory
    (wanted,), (got,) = steps(online), steps(again)
    for name in ("reward/mean", "reward/std", "reward/model_mean", "reward/part/reward_model"):
        assert got[name] == pytest.approx(wanted[name], abs=1e-6), name
    with pytest.raises(UnsupportedError, match=r"\[\[group_filters\]\] choose .* \[reward_model\]"):
        prepare(resolve(load(tables, [*keys, 'group_filters=[{use="zero_variance"}]'])))


def test_groups_that_end_beside_training_are_valued_between_its_passes(rl: Rl, judge: Path) -> None:
    """Drained runs have the same bits, whenever the ranks find time to value; the first step is that of sampling in turns."""
    weighed = (f"reward_model.path={judge}", "reward_model.weight=50.0", 'group_filters=[{use="reward_range", low=0.0}]')
    keys = (*weighed, "rl.steps=3", "rollouts.max_drop_share=0.9")
    beside = (*keys, "rl.staleness=1", "rl.in_flight_updates=false")
    runs = [
        run_rl(rl(name, *beside, f"rollouts.workers={workers}", environment={"jitter": 0.03})).directory
        for name, workers in (("one", 1), ("many", 3))
    ]
    assert weights_of(runs[0]) == weights_of(runs[1])
    rewards = [[step["reward/mean"] for step in steps(run)] for run in runs]
    assert rewards[0] == rewards[1]
    recorded = {group.ticket: group for group in read_groups(runs[0] / "rollouts")}
    assert any(group.dropped == "too_low" for group in recorded.values()), "what the ranks say decides"
    assert all(REWARD_MODEL in attempt.metrics for group in recorded.values() for attempt in group.finished)
    turns = run_rl(rl("turns", *keys, "rl.steps=1", environment={"jitter": 0.03})).directory
    assert steps(turns)[0]["reward/model_mean"] == steps(runs[0])[0]["reward/model_mean"]


@pytest.mark.proof
@pytest.mark.usefixtures("without_ray")
def test_two_ranks_value_a_single_attempt_as_one(rl: Rl, judge: Path) -> None:
    """Groups of one: there are more ranks than attempts to value."""
    keys = ("rl.steps=1", "rl.group_size=1", "advantage.use=reinforce_pp", f"reward_model.path={judge}")
    one = run_rl(rl("one", *keys)).directory
    two = run_rl(rl("two", *keys, "run.ranks=2", "run.launch=ray")).directory
    (wanted,), (got,) = steps(one), steps(two)
    for name in ("reward/model_min", "reward/model_max", "reward/mean"):
        assert got[name] == pytest.approx(wanted[name], abs=1e-5), name


@pytest.mark.nightly
def test_a_killed_run_values_as_one_that_was_not(rl: Rl, judge: Path, tables_of: Callable[..., dict[str, Any]]) -> None:
    """Values that the journal holds are kept, others are computed again to the same bits, and filters decide alike."""
    keys = ("rl.steps=3", "checkpoint.every=1", f"reward_model.path={judge}", 'group_filters=[{use="reward_range", high=1.5}]')
    whole = run_rl(rl("whole", *keys)).directory
    for moment, count in (("a group recorded", 2), ("sampling", 9), ("a record half written", 5)):
        kill_run(tables_of("parts"), keys, moment, count)
    parts = run_rl(rl("parts", *keys), resume=True).directory
    assert weights_of(parts) == weights_of(whole)
    assert numbers_of(parts) == numbers_of(whole)
    assert any(name.startswith("rollout/dropped/too_high") for record in numbers_of(whole) for name in record)


def test_a_name_that_an_environment_took_is_refused(judge: Path, rl: Rl) -> None:
    prepared = prepare(rl("run", f"reward_model.path={judge}"))
    assert prepared.reward_model is not None
    engine: Any = None
    taken = plain_group(3, rewards=(1.0, 0.0), parts={REWARD_MODEL: 0.5})
    with pytest.raises(ContractError, match=r"gives a part or metric 'reward_model' to task .*task-3"):
        prepared.reward_model.add_rewards(engine, [taken])


def test_a_value_that_is_not_finite_is_the_reward_models_fault(rl: Rl, judge: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(judge, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file({**weights, "score.weight": np.full_like(weights["score.weight"], np.nan)}, broken / "model.safetensors")
    with pytest.raises(ModelError, match=r"the reward model .*broken values attempt 0 of group \d at nan"):
        run_rl(rl("run", "rl.steps=1", f"reward_model.path={broken}"))


def test_what_cannot_work_is_refused_while_planning(rl: Rl, world: Path, judge: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no sequence classifier"):
        prepare(rl("run", f"reward_model.path={world / 'model'}"))
    with pytest.raises(ModelError, match="the reward model cannot be used"):
        prepare(rl("run", "reward_model.path=./nowhere"))
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
