"""`[reward_model]`: a frozen classifier whose value at the end of an attempt is a part of its reward."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import rarely
from rl_runs import Rl, Seen, kill_run, numbers_of, weights_of
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from skyrl_engine.config import load, resolve
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.rollout import SEGMENT_SAMPLED, Group, Trajectory
from skyrl_engine.errors import ConfigError, ContractError, ModelError, UnsupportedError
from skyrl_engine.modeling.classifier import become_classifier
from skyrl_engine.modeling.tiny import make_parts_differ, write_model, write_tokenizer
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.journal_index import read_groups
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.rollout_cases import plain_group
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


@pytest.fixture(scope="module")
def foreigner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with fewer tokens than the trained model, a template of its own, and another architecture."""
    folder = tmp_path_factory.mktemp("foreigner")
    texts = ["go on and more of it, please", "USER says: MODEL says: 0123456789"]
    tokenizer = write_tokenizer(folder, texts, size=300, template=OWN_TEMPLATE)
    write_model(folder, "llama", value_head=True, tokenizer=tokenizer, max_position_embeddings=2048)
    become_classifier(folder, ModelConfig(str(folder), value_head=True, classifier=True), tokenizer.pad_token_id)
    make_parts_differ(folder)
    weights = load_file(folder / "model.safetensors")
    # a reward model's head has none
    weights.pop("score.bias")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


OWN_TEMPLATE = (
    "{% for message in messages %}{{ 'USER says: ' if message['role'] == 'user' else 'MODEL says: ' }}{{ message['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}MODEL says: {% endif %}"
)


def rewarded(*paths: Path | str, **keys: Any) -> str:
    """The override that names reward models, each with these keys."""
    return f"rl.reward_models={json.dumps([{'path': str(path), **keys} for path in paths])}".replace('": ', '"=')


def steps(directory: Path) -> list[dict[str, float]]:
    return [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def test_the_value_at_the_end_of_an_attempt_is_a_part_of_its_reward(rl: Rl, seen: Seen, judge: Path) -> None:
    """Each attempt's share is half of the score that transformers gives its last text, closed as the template closes it."""
    resolved = rl("run", "rl.steps=1", rewarded(judge, weight=0.5))
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
    assert metrics["reward/model/reward_model/mean"] == pytest.approx(np.mean(scores), abs=1e-5)
    assert metrics["reward/model/reward_model/max"] == pytest.approx(np.max(scores), abs=1e-5)
    assert metrics["reward/part/reward_model"] == pytest.approx(np.mean(scores) / 2, abs=1e-5)
    columns = seen.plans[1].columns
    trained = np.bincount(columns.trajectory_ids, weights=np.add.reduceat(columns.columns["rewards"], columns.action_offsets[:-1]))
    earned = [float(trajectory.rewards.sum()) for trajectory in attempts]
    assert np.std(earned) > 0
    expected = [reward + score / 2 for reward, score in zip(earned, scores, strict=True)]
    np.testing.assert_allclose(trained, expected, atol=1e-5)
    assert metrics["reward/mean"] == pytest.approx(np.mean(expected), abs=1e-5)


def test_a_resumed_run_has_the_same_bits_and_an_evaluation_the_models_part(rl: Rl, judge: Path) -> None:
    keys = (rewarded(judge), "evaluation.every=1", "evaluation.tasks=2", "evaluation.samples=1")
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
    assert steps(whole)[1]["reward/model/reward_model/mean"] == steps(whole.parent / "cut")[1]["reward/model/reward_model/mean"]


def test_filters_and_the_journal_see_the_whole_reward(rl: Rl, judge: Path, tmp_path: Path) -> None:
    """A run drops the groups whose whole reward is above the median of another run's, which drops none, and samples others in their place."""
    keys = ("rl.steps=1", "rl.groups=4", rewarded(judge, weight=50.0))
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
    assert metrics["reward/part/reward_model"] == pytest.approx(50 * metrics["reward/model/reward_model/mean"])
    assert metrics["reward/mean"] <= bound


def means(group: Group) -> tuple[float, float]:
    """Mean of a group's rewards, and of the reward model's part in them."""
    return float(np.mean([trajectory.reward for trajectory in group.finished])), float(
        np.mean([trajectory.parts[REWARD_MODEL] for trajectory in group.finished])
    )


def test_recorded_rollouts_are_valued_anew(rl: Rl, judge: Path, tables_of: Callable[..., dict[str, Any]]) -> None:
    """The recorded part of a reward model is replaced, not doubled: with the same model, the same step."""
    keys = ("rl.steps=1", "rl.old=current", rewarded(judge))
    online = run_rl(rl("online", *keys)).directory
    tables = tables_of("offline")
    del tables["environments"]
    tables["rl"]["rollouts"] = str(online)
    again = run_rl(resolve(load(tables, keys))).directory
    (wanted,), (got,) = steps(online), steps(again)
    for name in ("reward/mean", "reward/std", "reward/model/reward_model/mean", "reward/part/reward_model"):
        assert got[name] == pytest.approx(wanted[name], abs=1e-6), name
    with pytest.raises(UnsupportedError, match=r"\[\[group_filters\]\] choose .* \[\[rl\.reward_models\]\]"):
        prepare(resolve(load(tables, [*keys, 'group_filters=[{use="zero_variance"}]'])))


@pytest.mark.nightly
def test_groups_that_end_beside_training_are_valued_between_its_passes(rl: Rl, judge: Path) -> None:
    """Drained runs have the same bits, whenever the ranks find time to value; the first step is that of sampling in turns."""
    weighed = (rewarded(judge, weight=50.0), 'group_filters=[{use="reward_range", low=0.0}]')
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
    assert steps(turns)[0]["reward/model/reward_model/mean"] == steps(runs[0])[0]["reward/model/reward_model/mean"]


@pytest.mark.proof
@pytest.mark.usefixtures("without_ray")
def test_two_ranks_value_a_single_attempt_as_one(rl: Rl, judge: Path, foreigner: Path) -> None:
    """Groups of one: there are more ranks than attempts to value."""
    keys = ("rl.steps=1", "rl.group_size=1", "advantage.use=reinforce_pp", rewarded(judge, foreigner))
    one = run_rl(rl("one", *keys)).directory
    two = run_rl(rl("two", *keys, "run.ranks=2", "run.launch=ray")).directory
    (wanted,), (got,) = steps(one), steps(two)
    for name in (*(f"reward/model/reward_model_{number}/{kind}" for number in (1, 2) for kind in ("min", "max")), "reward/mean"):
        assert got[name] == pytest.approx(wanted[name], abs=1e-5), name


@pytest.mark.nightly
def test_a_killed_run_values_as_one_that_was_not(rl: Rl, judge: Path, tables_of: Callable[..., dict[str, Any]]) -> None:
    """Values that the journal holds are kept, others are computed again to the same bits, and filters decide alike."""
    keys = ("rl.steps=3", "checkpoint.every=1", rewarded(judge), 'group_filters=[{use="reward_range", high=1.5}]')
    whole = run_rl(rl("whole", *keys)).directory
    for moment, count in (("a group recorded", 2), ("sampling", 9), ("a record half written", 5)):
        kill_run(tables_of("parts"), keys, moment, count)
    parts = run_rl(rl("parts", *keys), resume=True).directory
    assert weights_of(parts) == weights_of(whole)
    assert numbers_of(parts) == numbers_of(whole)
    assert any(name.startswith("rollout/dropped/too_high") for record in numbers_of(whole) for name in record)


def test_a_name_that_an_environment_took_is_refused(judge: Path, rl: Rl) -> None:
    prepared = prepare(rl("run", rewarded(judge)))
    (model,) = prepared.reward_models
    engine: Any = None
    taken = plain_group(3, rewards=(1.0, 0.0), parts={REWARD_MODEL: 0.5})
    with pytest.raises(ContractError, match=r"gives a part 'reward_model' or a metric 'reward_model' to task .*task-3"):
        model.add_rewards(engine, [taken])


def test_a_value_that_is_not_finite_is_the_reward_models_fault(rl: Rl, judge: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(judge, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file({**weights, "score.weight": np.full_like(weights["score.weight"], np.nan)}, broken / "model.safetensors")
    with pytest.raises(ModelError, match=r"the reward model .*broken values attempt 0 of group \d at nan"):
        run_rl(rl("run", "rl.steps=1", rewarded(broken)))


def test_what_cannot_work_is_refused_while_planning(rl: Rl, world: Path, judge: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no sequence classifier"):
        prepare(rl("run", rewarded(world / "model")))
    with pytest.raises(ModelError, match="the reward model cannot be used"):
        prepare(rl("run", rewarded("./nowhere")))
    with pytest.raises(ConfigError, match=r"Set rl\.reward_models"):
        prepare(rl("run", f"reward_model.path={judge}"))
    several = shutil.copytree(judge, tmp_path / "several")
    stated = json.loads((several / "config.json").read_text())
    (several / "config.json").write_text(json.dumps({**stated, "id2label": {"0": "no", "1": "yes"}}))
    with pytest.raises(ModelError, match="with 2 labels, and a reward is one number"):
        prepare(rl("run", rewarded(several)))


@pytest.mark.parametrize(
    "layout",
    [
        ("collator.use=padded", "rl.micro_batch_rows=2"),
        rarely(("collator.use=packed", "rl.micro_batch_tokens=none")),
        rarely(("collator.use=tree", "rl.micro_batch_tokens=300")),
    ],
)
def test_a_reward_model_with_other_tokens_reads_messages_in_its_own(
    rl: Rl, seen: Seen, judge: Path, foreigner: Path, layout: tuple[str, ...]
) -> None:
    """The part of each attempt is what transformers computes in float64 of its messages, by the model's own template and tokens.

    One model has the trained model's tokens, one its own and fewer of them, and both are parts of the reward under their names.
    """
    tables = [{"path": str(judge), "name": "same", "weight": 0.5}, {"path": str(foreigner), "name": "other", "weight": -2.0}]
    keys = f"rl.reward_models={json.dumps(tables)}".replace('": ', '"=')
    (metrics,) = steps(run_rl(rl("run", "rl.steps=1", keys, *layout)).directory)
    attempts = [trajectory for group in seen.groups[1] for trajectory in group.finished]
    policy = AutoTokenizer.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(foreigner)
    oracle = AutoModelForSequenceClassification.from_pretrained(foreigner).double().eval()
    values = []
    for attempt in attempts:
        said = [policy.decode(ids, skip_special_tokens=True) for ids in sampled_turns(attempt)]
        assert [message["content"] for message in attempt.messages if message["role"] == "assistant"] == said
        assert attempt.messages[0]["content"].startswith("go ")
        text = tokenizer.apply_chat_template(list(attempt.messages), tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            values.append(oracle(torch.tensor([ids])).logits.item())
    assert np.std(values) > 0.1
    np.testing.assert_allclose([attempt.metrics["reward_model/other"] for attempt in attempts], values, atol=2e-5)
    np.testing.assert_allclose([attempt.parts["other"] for attempt in attempts], -2 * np.array(values), atol=4e-5)
    for attempt in attempts:
        whole = attempt.rewards.sum() + attempt.parts["same"] + attempt.parts["other"]
        assert attempt.reward == pytest.approx(whole, abs=1e-9)
    assert metrics["reward/model/other/mean"] == pytest.approx(np.mean(values), abs=2e-5)
    assert metrics["reward/model/other/max"] == pytest.approx(np.max(values), abs=2e-5)
    assert metrics["reward/part/other"] == pytest.approx(-2 * np.mean(values), abs=4e-5)
    assert metrics["reward/part/same"] == pytest.approx(metrics["reward/model/same/mean"] / 2)


def sampled_turns(attempt: Trajectory) -> list[list[int]]:
    """The tokens of every turn of the model."""
    bounds = zip(attempt.segment_offsets[:-1], attempt.segment_offsets[1:], attempt.kinds, strict=True)
    return [attempt.token_ids[start:end].tolist() for start, end, kind in bounds if kind == SEGMENT_SAMPLED]


@pytest.mark.nightly
def test_padding_with_a_token_that_the_reward_model_lacks_changes_nothing(rl: Rl, seen: Seen, foreigner: Path) -> None:
    keys = ("rl.steps=1", "rl.micro_batch_rows=4", rewarded(foreigner), "collator.use=padded")
    found = []
    known = len(AutoTokenizer.from_pretrained(foreigner))
    for name, pad in (("within", 0), ("beyond", known)):
        run_rl(rl(name, *keys, f"collator.pad_token_id={pad}"))
        found.append([attempt.metrics[REWARD_MODEL] for group in seen.groups[1] for attempt in group.finished])
    assert found[0] == found[1]


@pytest.mark.nightly
def test_a_recording_with_messages_is_valued_by_them_and_one_without_is_refused(
    rl: Rl, judge: Path, foreigner: Path, tables_of: Callable[..., dict[str, Any]]
) -> None:
    # in float32 the rows that are valued together decide the last bit
    keys = ("rl.steps=1", "rl.old=current", "model.dtype=float64", rewarded(foreigner, name="other"))
    online = run_rl(rl("online", *keys)).directory
    tables = tables_of("offline")
    del tables["environments"]
    again = run_rl(resolve(load({**tables, "rl": {**tables["rl"], "rollouts": str(online)}}, keys))).directory
    (wanted,), (got,) = steps(online), steps(again)
    for name in ("reward/mean", "reward/model/other/mean", "reward/part/other"):
        assert got[name] == pytest.approx(wanted[name], abs=1e-6), name
    without = run_rl(rl("without", "rl.steps=1", rewarded(judge))).directory
    assert not any(attempt.messages for group in read_groups(without / "rollouts") for attempt in group.finished)
    with pytest.raises(
        UnsupportedError, match=r"reads attempts by their messages, .* and the rollouts of .*without were recorded without"
    ):
        prepare(resolve(load({**tables, "rl": {**tables["rl"], "rollouts": str(without)}}, keys)))


def test_a_tokenizer_without_a_template_needs_one_named(rl: Rl, foreigner: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(foreigner, tmp_path / "bare")
    for name in ("chat_template.jinja",):
        (bare / name).unlink(missing_ok=True)
    assert AutoTokenizer.from_pretrained(bare).chat_template is None
    with pytest.raises(UnsupportedError, match=r"has no chat template .*Set rl\.reward_models\[0\]\.chat_template"):
        prepare(rl("run", rewarded(bare)))
    template = tmp_path / "mine.jinja"
    template.write_text(OWN_TEMPLATE)
    (model,) = prepare(rl("run", rewarded(bare, chat_template=str(template)))).reward_models
    assert model.renderer is not None
    assert model.renderer.tokenizer.chat_template == OWN_TEMPLATE


def test_a_template_of_its_own_over_the_same_tokens_writes_the_attempts(rl: Rl, judge: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(OWN_TEMPLATE)
    (own,) = prepare(rl("run", rewarded(judge, chat_template=str(template)))).reward_models
    (same,) = prepare(rl("run", rewarded(judge))).reward_models
    assert own.renderer is not None
    assert same.renderer is None


def test_names_of_several_are_numbered_where_they_are_alike(rl: Rl, judge: Path) -> None:
    models = prepare(rl("run", rewarded(judge, judge))).reward_models
    assert [model.name for model in models] == ["reward_model_1", "reward_model_2"]
    assert len({model.frozen.name for model in models}) == 2
