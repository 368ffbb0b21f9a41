"""Process rewards: a reward model's value of every step of an attempt's last turn, at the step's last token or as one number."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now, rarely
from rl_runs import Rl, Seen, steps_of
from transformers import AutoModelForTokenClassification, AutoTokenizer

from skyrl_engine.config import load, resolve
from skyrl_engine.config.schema import RewardModelTable
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.rollout import SEGMENT_SAMPLED, Trajectory
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.classifier import become_classifier
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.rollout.journal_index import read_groups
from skyrl_engine.training.rl.reward_model import find_right_label
from skyrl_engine.training.rl.run import run_rl

SEPARATOR = "\ufffd"
"""Stands between steps: the sign for bytes that are no character, which a random model samples most often."""

OWN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_judge(folder: Path, tokenizer: Any) -> Path:
    write_model(folder, "llama", value_head=True, tokenizer=tokenizer, max_position_embeddings=2048)
    become_classifier(folder, ModelConfig(str(folder), value_head=True, classifier=True), tokenizer.pad_token_id)
    return folder


@pytest.fixture(scope="module", params=["the trained model's tokens", "tokens of its own"])
def judge(request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random process reward model."""
    folder = tmp_path_factory.mktemp("steps")
    if request.param == "tokens of its own":
        return write_judge(
            folder, write_tokenizer(folder, ["go on and more, please", "0123456789"], size=300, template=OWN_TEMPLATE)
        )
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    tokenizer.save_pretrained(folder)
    return write_judge(folder, tokenizer)


def judged(path: Path, steps: str, **keys: Any) -> str:
    table = {"path": str(path), "name": "prm", "steps": steps, "step_separator": SEPARATOR, **keys}
    return f"rl.reward_models={json.dumps([table])}".replace('": ', '"=')


def probabilities_of(judge: Path, attempt: Trajectory, good: int | None = None) -> tuple[list[str], list[float]]:
    """The steps of the last turn and, in float64, what transformers' token classifier says after each separator; `good` is of two labels."""
    tokenizer = AutoTokenizer.from_pretrained(judge)
    classifier: Any = AutoModelForTokenClassification.from_pretrained(
        judge, num_labels=2 - (good is None), dtype=torch.float64
    ).eval()
    *before, last = attempt.messages
    prompt = tokenizer.apply_chat_template([dict(message) for message in before], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    steps = [step for step in last["content"].split(SEPARATOR) if step.strip()] or [last["content"]]
    places = []
    for step in steps:
        ids = (
            ids
            + tokenizer(step, add_special_tokens=False)["input_ids"]
            + tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"]
        )
        places.append(len(ids) - 1)
    with torch.no_grad():
        logits = classifier(torch.tensor([ids])).logits[0]
    probabilities = logits[:, 0].sigmoid() if good is None else logits.softmax(dim=-1)[:, good]
    return steps, probabilities[places].tolist()


RULES: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": lambda values: sum(values) / len(values),
    "last": lambda values: values[-1],
    "product": lambda values: float(np.prod(values)),
}


@pytest.mark.parametrize("rule", now(RULES, "min"))
def test_one_number_is_made_of_the_steps(rl: Rl, seen: Seen, judge: Path, rule: str) -> None:
    run = run_rl(rl("run", "rl.steps=1", judged(judge, rule, weight=3.0))).directory
    attempts = [attempt for group in seen.groups[1] for attempt in group.finished]
    found = [probabilities_of(judge, attempt)[1] for attempt in attempts]
    assert max(map(len, found)) > 1, "some answer has several steps"
    wanted = [RULES[rule](values) for values in found]
    assert np.std(wanted) > 1e-3
    np.testing.assert_allclose([attempt.metrics["reward_model/prm"] for attempt in attempts], wanted, atol=2e-6)
    np.testing.assert_allclose([attempt.unplaced_reward for attempt in attempts], 3 * np.array(wanted), atol=6e-6)
    assert steps_of(run)[0]["metrics"]["reward/part/prm"] == pytest.approx(3 * np.mean(wanted), abs=6e-6)


NAMES = {"LABEL_0 LABEL_1": 1, "good bad": 0, "incorrect correct": 1}


def find_in(names: Sequence[str], **keys: Any) -> int | None:
    table = RewardModelTable("prm", **{"steps": "min", **keys})
    config = SimpleNamespace(num_labels=2, architectures=["Qwen3ForTokenClassification"], id2label=dict(enumerate(names)))
    return find_right_label("rl.reward_models[0]", table, config)


def test_names_say_which_of_two_labels_is_right() -> None:
    assert [find_in(names.split()) for names in NAMES] == list(NAMES.values())
    assert find_in(["x", "y"], right_label=0) == 0
    with pytest.raises(ModelError, match=r"'x' and 'y'.* do not say"):
        find_in(["x", "y"])
    with pytest.raises(ModelError, match="values steps"):
        find_in(["good", "bad"], steps=None)


def test_a_classifier_with_two_labels_gives_its_right_label_s_probability(rl: Rl, seen: Seen, world: Path, tmp_path: Path) -> None:
    """With a bias, as TRL's PRMTrainer writes it."""
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    write_model(tmp_path / "plain", "llama", tokenizer=tokenizer, max_position_embeddings=2048)
    model: Any = AutoModelForTokenClassification.from_pretrained(tmp_path / "plain", num_labels=2, id2label={0: "good", 1: "bad"})
    with torch.no_grad():
        model.score.weight.normal_(std=0.3, generator=torch.manual_seed(3))
        model.score.bias.copy_(torch.tensor([0.4, -0.3]))
    model.save_pretrained(tmp_path / "prm")
    tokenizer.save_pretrained(tmp_path / "prm")
    run_rl(rl("run", "rl.steps=1", judged(tmp_path / "prm", "min")))
    found = [attempt for group in seen.groups[1] for attempt in group.finished]
    wanted = [min(probabilities_of(tmp_path / "prm", attempt, good=0)[1]) for attempt in found]
    assert np.std(wanted) > 1e-3
    np.testing.assert_allclose([attempt.metrics["reward_model/prm"] for attempt in found], wanted, atol=2e-6)


@pytest.mark.parametrize("layout", [("collator.use=packed",), rarely(("collator.use=padded", "rl.micro_batch_rows=2"))])
def test_each_step_is_rewarded_at_its_last_token(rl: Rl, seen: Seen, judge: Path, world: Path, layout: tuple[str, ...]) -> None:
    """The text of the sampled tokens up to a reward's place is the text up to the end of its step, but for a token that spans the end.

    The columns that are trained on have these rewards, token by token.
    """
    run_rl(rl("run", "rl.steps=1", judged(judge, "each", weight=0.5), *layout))
    policy = AutoTokenizer.from_pretrained(world / "model")
    attempts = [attempt for group in seen.groups[1] for attempt in group.finished]
    columns = seen.plans[1].columns
    plain = run_rl(rl("plain", "rl.steps=1")).directory
    without = {
        (group.ticket, attempt.member): attempt.rewards for group in read_groups(plain / "rollouts") for attempt in group.finished
    }
    for attempt in attempts:
        steps, probabilities = probabilities_of(judge, attempt)
        earned = attempt.rewards - without[attempt.ticket, attempt.member]
        turn = np.flatnonzero(attempt.kinds == SEGMENT_SAMPLED)[-1]
        ids = attempt.token_ids[attempt.segment_offsets[turn] : attempt.segment_offsets[turn + 1]].tolist()
        first = len(attempt.rewards) - len(ids)
        expected, text, place = np.zeros(len(attempt.rewards)), attempt.messages[-1]["content"], 0
        for step, probability in zip(steps, probabilities, strict=True):
            place = text.index(step, place) + len(step)
            count = next(
                n for n in range(1, len(ids) + 1) if n == len(ids) or len(policy.decode(ids[:n], skip_special_tokens=True)) >= place
            )
            expected[first + count - 1] += probability / 2
        np.testing.assert_allclose(earned, expected, atol=2e-6)
        assert attempt.parts["prm"] == pytest.approx(sum(probabilities) / 2, abs=4e-6)
    trained = columns.columns["rewards"][columns.loss_weight != 0]
    np.testing.assert_allclose(trained, np.concatenate([attempt.rewards for attempt in attempts]), atol=1e-6)


def test_placed_rewards_of_a_recording_are_replaced(rl: Rl, judge: Path, tables_of: Callable[..., dict[str, Any]]) -> None:
    keys = ("rl.steps=1", "rl.old=current", judged(judge, "each"))
    online = run_rl(rl("online", *keys)).directory
    tables = tables_of("offline")
    del tables["environments"]
    tables["rl"]["rollouts"] = str(online)
    again = run_rl(resolve(load(tables, keys))).directory
    (wanted,), (got,) = steps_of(online), steps_of(again)
    for name in ("reward/mean", "reward/std", "reward/model/prm/mean", "reward/part/prm"):
        assert got["metrics"][name] == pytest.approx(wanted["metrics"][name], abs=1e-6), name
