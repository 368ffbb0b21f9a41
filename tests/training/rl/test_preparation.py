"""Refusals while planning a run by reinforcement, before a rank or an environment starts; each message names the key and the remedy."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rl_runs import Rl

from skyrl_engine.config import load, resolve
from skyrl_engine.config.automatic import with_recorded_choices
from skyrl_engine.engine.automatic import Choices
from skyrl_engine.errors import ConfigError, DataError, ModelError, UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.training.rl.dry_run import facts, plan_rl
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.prepared import LiveRolloutSpec

KL_TERM = "loss.terms=[{use='kl', coef=0.1}]"


@pytest.mark.parametrize(
    ("overrides", "error", "words", "remedy"),
    [
        (["rl.group_size=1"], UnsupportedError, "rl.group_size is 1: every advantage would be 0", "Raise rl.group_size"),
        (["reference.precompute=true"], ConfigError, r"reference.precompute: precomputing needs fixed data", "Remove it"),
        (["rl.mini_batches=4"], ConfigError, r"rl.mini_batches: is 4, and a batch has 3 groups", "Lower rl.mini_batches"),
        (["environments=[]"], ConfigError, "environments: there is no environment", "Add [[environments]]"),
        (
            ["rl.max_tokens=65"],
            UnsupportedError,
            "attempts of up to 129 tokens, and the model has 128 positions",
            "rl.max_prompt_tokens=64 rl.max_tokens=64",
        ),
        (
            ["rl.repeat_tasks=false", "rl.steps=3"],
            DataError,
            "has 7 tasks, and 3 steps of 3 groups take 9 of it",
            "rl.repeat_tasks = true",
        ),
        (
            ["model.lora={rank=2, dropout=0.1}"],
            UnsupportedError,
            "model.lora.dropout 0.1",
            "model.lora.dropout = 0",
        ),
        (["rl.kl.coef=0.1", KL_TERM], UnsupportedError, "off the rewards, and .*kl.* adds it to the loss", "Remove [rl.kl]"),
        (["rl.micro_batch_rows=2", "rl.micro_batch_tokens=64"], ConfigError, "rl.micro_batch_rows is set too", "Give one of"),
        (
            ["rl.old=current", "rl.epochs=2"],
            UnsupportedError,
            "later optimizer steps of the batch need those of its first",
            'rl.old = "auto"',
        ),
        (
            ["model.lora.rank=2", "rl.kl.coef=0.1", "reference.refresh_every=2"],
            UnsupportedError,
            "reference.refresh_every copies the whole trained model",
            "Remove reference.refresh_every",
        ),
        (["loss.terms=[{use='value_clip', coef=0.5}]"], UnsupportedError, "values", ""),
        (
            ["advantage.use=gae"],
            UnsupportedError,
            "gae.* needs old_values, and the model has no value head",
            "model.value_head = true",
        ),
        (["rl.kl.coef=0.1", "reference.path=./nowhere"], ModelError, "the reference cannot be used", "Correct reference.path"),
    ],
)
def test_what_cannot_work_is_refused(rl: Rl, overrides: list[str], error: Any, words: str, remedy: str) -> None:
    with pytest.raises(error, match=words) as caught:
        prepare(rl("run", *overrides))
    found = (
        "\n".join(problem.remedy for problem in caught.value.problems)
        if isinstance(caught.value, ConfigError)
        else caught.value.remedy
    )
    assert remedy in found


@pytest.mark.parametrize(
    ("capabilities", "accepts", "placement", "words"),
    [
        ("{'logprobs'}", "('tensors',)", "rank", "rl.stop_strings is set, and generator 'mine'"),
        ("{'logprobs'}", "()", "rank", "takes no weights"),
        ("{'seeded'}", "('tensors',)", "rank", "does not declare the capability 'logprobs'"),
    ],
)
def test_a_generator_that_nothing_can_be_trained_with_is_refused(
    rl: Rl, tmp_path: Path, capabilities: str, accepts: str, placement: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "from skyrl_engine import hookimpl\n"
        "from skyrl_engine.contracts import GeneratorDescription\n"
        "class Mine:\n"
        "    @hookimpl\n"
        "    def skyrl_engine_describe_generator(self, config):\n"
        f"        return GeneratorDescription(frozenset({capabilities}), {accepts}, {placement!r}, 4)\n"
        "    @hookimpl\n"
        "    def skyrl_engine_make_generator(self, config):\n"
        "        raise AssertionError('nothing is started')\n"
        "mine = Mine()\n"
    )
    settings = ("rl.stop_strings=['a']",) if "stop_strings" in words else ()
    config = rl("run", f"generator.use={tmp_path}/mine.py:mine", *settings)
    with pytest.raises(UnsupportedError, match=words) as caught:
        prepare(config)
    assert "such as hf" in caught.value.remedy


def test_a_reference_that_does_not_know_all_tokens_is_refused(rl: Rl, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "model", tmp_path / "small")
    write_model(tmp_path / "small", vocab_size=64)
    with pytest.raises(UnsupportedError, match=r"the reference .*small knows 64 tokens, and the trained model"):
        prepare(rl("run", "rl.kl.coef=0.1", f"reference.path={tmp_path / 'small'}"))


def test_dropout_of_the_model_is_refused_where_it_trains(rl: Rl, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.1, "embd_pdrop": 0.25}))
    config = rl("run", f"model.path={tmp_path / 'model'}", "model.lora={rank=2, dropout=0.5}")
    with pytest.raises(UnsupportedError, match="dropout") as caught:
        prepare(config)
    assert "(attention_dropout 0.1, embd_pdrop 0.25 in config.json of" in str(caught.value)
    assert "model.lora.dropout 0.5)" in str(caught.value)
    assert caught.value.remedy == 'Set model.dropout = "off" and model.lora.dropout = 0'
    prepare(config, trains=False)
    prepare(rl("off", f"model.path={tmp_path / 'model'}", "model.dropout=off"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["rl.mini_batches=3"],
        ["rl.max_tokens=64"],
        ["rl.repeat_tasks=false", "rl.steps=2"],
        ["model.lora.rank=2"],
        ["rl.kl.coef=0.1"],
        [KL_TERM],
        ["rl.group_size=1", "advantage.use=reinforce_pp"],
    ],
)
def test_what_is_next_to_it_is_planned(rl: Rl, overrides: list[str]) -> None:
    assert prepare(rl("run", *overrides)).optimizer_steps > 0


def test_a_table_of_another_trainer_is_refused_by_name(rl: Rl) -> None:
    with pytest.raises(
        ConfigError, match=r"\[training\] is a table of the trainers sft, preference and reward_model, and this run's trainer is rl"
    ):
        rl("run", "training.steps=3")
    with pytest.raises(ConfigError, match=r"\[data\] is a table of the trainers sft, preference and reward_model"):
        rl("run", "data.train=d")
    with pytest.raises(ConfigError, match=r"\[rl\] is a table of trainer rl, and this run's trainer is sft"):
        resolve(load(None, ["model.path=m", "data.train=d", "rl.steps=3"]))


def test_every_preset_is_planned_and_nothing_is_written(rl: Rl, tmp_path: Path) -> None:
    plans = {name: plan_rl(rl("run", "rl.groups=4", preset=name)) for name in ("grpo", "gspo", "ppo", "reinforce_pp", "rloo")}
    assert plans["grpo"].passes == ("sample", "train (the policy is its own old one)")
    assert plans["gspo"].passes == ("sample", "score logprobs as old_logprobs", "train")
    assert plans["ppo"].passes[1:] == ("score logprobs as old_logprobs", "score values as old_values", "train")
    assert "score logprobs of the reference as ref_logprobs" in plans["reinforce_pp"].passes
    assert plans["reinforce_pp"].reference is not None
    assert plans["rloo"].passes == ("sample", "train")
    assert not list(tmp_path.iterdir())
    lines = facts(plans["grpo"])
    assert lines["tasks of world"] == "7 to train on, 2 held out"
    assert "go" in lines["first prompt of world"].replace("|", "")
    assert "an answer" in lines["between turns of world"].replace("|", "")


def test_a_plan_says_what_keys_and_values_take(rl: Rl, world: Path) -> None:
    """Bytes of a token: of every layer, so many heads of keys and as many of values, 4 bytes a number."""
    sizes = json.loads((world / "model" / "config.json").read_text())
    token_bytes = sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * 2 * 4
    held = facts(plan_rl(rl("run", "generator.cache_tokens=4096", "model.dtype=float32")))["keys and values"]
    assert held.startswith(f"4,096 tokens on each rank, {4 * token_bytes:.1f} KiB; {token_bytes} B a token")
    free = facts(plan_rl(rl("run")))["keys and values"]
    assert free.startswith("as many as 25% of the memory takes that is free on each rank; ")
    with pytest.raises(
        UnsupportedError, match=r"holds keys and values of 8 tokens, and rl.max_prompt_tokens and rl.max_tokens"
    ) as caught:
        prepare(rl("run", "generator.cache_tokens=8"))
    assert "Raise generator.cache_tokens" in caught.value.remedy


def test_the_longest_prompt_follows_from_the_positions(rl: Rl) -> None:
    prepared = prepare(rl("run", "rl.max_prompt_tokens=auto"))
    assert prepared.resolved.config.rl.max_prompt_tokens == 128 - 44
    assert prepared.longest == 128
    assert [str(choice) for choice in prepared.choices if choice.key == "rl.max_prompt_tokens"] == [
        "rl.max_prompt_tokens = 84: what rl.max_tokens = 44 leaves of the model's 128 positions"
    ]
    again = with_recorded_choices(rl("run", "rl.max_prompt_tokens=auto", "rl.max_tokens=30"), prepared.resolved.as_dict())
    assert again.config.rl.max_prompt_tokens == 84, "a run goes on with what it was begun with"
    with pytest.raises(UnsupportedError, match="attempts of up to 192 tokens") as caught:
        prepare(rl("run", "rl.max_prompt_tokens=auto", "rl.max_tokens=128"))
    assert "rl.max_prompt_tokens=64 rl.max_tokens=64" in caught.value.remedy


def test_the_longest_prompt_is_1024_where_positions_allow() -> None:
    for positions in (None, 4096):
        tables = {
            "trainer": "rl",
            "model": {"path": "m"},
            "environments": [{"use": "function", "reward": "./a.py:b", "data": "t.jsonl"}],
        }
        choices = Choices(resolve(load(tables, ())))
        choices.choose_max_prompt_tokens(cast("ModelFacts", SimpleNamespace(extended_length=positions)))
        assert choices.resolved.config.rl.max_prompt_tokens == 1024
        assert choices.made == []


def test_several_environments_of_one_plugin_have_numbers(rl: Rl, world: Path) -> None:
    use = f"{world / 'world.py'}:world"
    recipe = prepare(rl("run", f"environments=[{{use='{use}'}}, {{use='{use}', weight=3.0}}]"))
    assert recipe.names == ("world_1", "world_2")
    assert isinstance(recipe.rollouts, LiveRolloutSpec)
    assert recipe.rollouts.tasks.weights == [1.0, 3.0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.use=cross_entropy"], "all attempts are learned alike, whatever their reward"),
        (["collator.use=packed", "rl.micro_batch_tokens=100"], "holds no attempt of rl.max_prompt_tokens + rl.max_tokens"),
        (["loss.use=reinforce", "rl.mini_batches=3"], "no ratio corrects for it"),
        (["rl.mini_batches=3"], None),
        (["loss.use=reinforce"], None),
        (["rl.micro_batch_tokens=4096"], None),
    ],
)
def test_what_is_hardly_meant_is_told(rl: Rl, caplog: pytest.LogCaptureFixture, overrides: list[str], words: str | None) -> None:
    prepare(rl("run", *overrides))
    assert (words in caplog.text) if words else not caplog.text
