"""Planning refuses what a run would meet later, all mistakes at once: of every trainer, with every collator and key of micro-batches."""

import json
import math
from pathlib import Path

import click
import pytest

from skyrl_engine.cli.app import app
from skyrl_engine.cli.command import every_command
from skyrl_engine.cli.demo.recipe import Exchange, write_exchanges
from skyrl_engine.cli.demo.tiny import make_model
from skyrl_engine.config.trainers import TRAINERS

REWARD = """
def right(action, task):
    return float(action.text.strip() == task.data["answer"])
"""

TABLES = {
    "sft": '[data]\ntrain = "./rows.jsonl"\ncache = "./cache"\n',
    "preference": '[data]\ntrain = "./pairs.jsonl"\ncache = "./cache"\n',
    "reward_model": '[data]\ntrain = "./pairs.jsonl"\ncache = "./cache"\n',
    "rl": "[rl]\ngroups = 2\ngroup_size = 2\nmax_tokens = 8\nmax_prompt_tokens = 24\n"
    '[[environments]]\nuse = "function"\nreward = "./reward.py:right"\ndata = "./tasks.jsonl"\n',
}
"""Tables of a configuration of each trainer, without its model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "model"
    make_model(folder, [Exchange(f"Say {number:03d}", f"{number:03d}") for number in range(8)])
    return folder


@pytest.fixture
def plan(command, model, tmp_path):
    """`plan("rl", "key=value", ...)`: the outcome of a dry run of a trainer."""
    exchanges = [Exchange(f"Say {number:03d}", f"{number:03d}" * (1 + 60 * (number == 7))) for number in range(8)]
    write_exchanges(tmp_path / "rows.jsonl", exchanges)
    pairs = [{"prompt": exchange.question, "chosen": exchange.answer, "rejected": "no"} for exchange in exchanges]
    tasks = [{"prompt": exchange.question, "answer": exchange.answer} for exchange in exchanges]
    for name, rows in (("pairs", pairs), ("tasks", tasks)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    for trainer in TRAINERS:
        text = f'trainer = "{trainer}"\n[model]\npath = "{model}"\n{TABLES[trainer]}'
        (tmp_path / f"{trainer}.toml").write_text(text)

    def run(trainer: str, *overrides: str):
        outcome = command("run", f"{trainer}.toml", "--dry-run", *overrides)
        assert "unexpected" not in outcome.err
        return outcome

    return run


def micro_batches(trainer: str) -> str:
    return "rl" if trainer == "rl" else "training"


def test_every_trainer_is_tried() -> None:
    assert TABLES.keys() == TRAINERS.keys()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_plain_configuration_of_every_trainer_is_planned(plan, trainer) -> None:
    assert plan(trainer).code == 0


# --- frozen parameters ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
def test_frozen_parameters_are_planned_or_refused_by_name(plan, trainer) -> None:
    assert plan(trainer, "model.freeze=['*.embed_tokens.*']").code == 0
    outcome = plan(trainer, "model.freeze=['*.embed_tokens.*', 'visual.*']")
    assert outcome.code == 2
    assert "model.freeze[1]: 'visual.*' matches no parameter" in outcome.last_line
    outcome = plan(trainer, "model.freeze=['*.embed_tokens.*']", "model.lora.rank=4")
    assert outcome.code == 2
    assert "remove model.freeze" in outcome.last_line
    assert plan(trainer, "model.freeze=['*.embed_tokens.*']", "backend.use=megatron").code == 0
    outcome = plan(trainer, "model.freeze=['visual.*']", "backend.use=megatron")
    assert outcome.code == 2
    assert "model.freeze[0]: 'visual.*' matches no parameter" in outcome.last_line


# --- precision -----------------------------------------------------------------------------------------------------------------------


def test_tf32_is_refused_by_name_where_ranks_compute_on_cpus(plan) -> None:
    outcome = plan("sft", "run.matmul_precision=high", "run.device=cpu")
    assert outcome.code == 2
    assert 'run.matmul_precision = "high" multiplies in TF32' in outcome.last_line
    assert 'Set run.matmul_precision = "highest"' in outcome.last_line


def test_float8_is_refused_by_name_where_it_cannot_be(plan) -> None:
    """The test environment has neither a device nor torchao; whichever is missed first is named, with what else is wrong."""
    outcome = plan("sft", "backend.float8=rowwise", "model.dtype=float32", "run.device=cpu")
    assert outcome.code == 2
    assert "takes the place of products in bfloat16, and model.dtype is float32" in outcome.err
    outcome = plan("sft", "backend.float8=rowwise", "model.dtype=bfloat16", "run.device=cpu")
    assert outcome.code == 2
    assert 'backend.float8 = "rowwise" needs' in outcome.last_line


# --- collators and micro-batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rows_are_not_counted_by_a_collator_that_fills_them(plan, trainer) -> None:
    outcome = plan(trainer, "collator.use=packed", f"{micro_batches(trainer)}.micro_batch_rows=3")
    assert outcome.code == 2
    assert "micro_batch_rows says nothing" in outcome.last_line
    assert "micro_batch_tokens" in outcome.last_line


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("settings", [("padded", "rows", 4), ("padded", "tokens", 900), ("packed", "tokens", 900)])
def test_what_a_collator_can_cut_is_planned(plan, trainer, settings) -> None:
    collator, key, size = settings
    outcome = plan(trainer, f"collator.use={collator}", f"{micro_batches(trainer)}.micro_batch_{key}={size}")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("trainer", [name for name in TRAINERS if name != "rl"])
@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_a_sample_that_fits_no_micro_batch_is_refused_wherever_it_stands(plan, trainer, collator) -> None:
    """The long sample is not of the first mini-batch, in the order of the file; nor is a held-out one of any."""
    small = (f"collator.use={collator}", "training.micro_batch_tokens=60", "training.batch_size=2", "training.shuffle=false")
    outcome = plan(trainer, *small)
    assert outcome.code == 4, outcome.out
    assert "where a" in outcome.last_line
    assert "Raise micro_batch_tokens" in outcome.last_line
    rows = Path({"sft": "rows"}.get(trainer, "pairs") + ".jsonl")
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:-1]))
    assert plan(trainer, *small).code == 0
    Path("held_out.jsonl").write_text(lines[-1])
    assert "where a" in plan(trainer, *small, "data.eval=./held_out.jsonl").last_line


@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_a_prompt_that_fits_no_micro_batch_is_refused(plan, collator) -> None:
    """An attempt at the task takes that and a token more, whatever is sampled."""
    tasks = Path("tasks.jsonl")
    tasks.write_text(tasks.read_text() + json.dumps({"prompt": "Say 001 " * 8, "answer": "1"}) + "\n")
    settings = (f"collator.use={collator}", "rl.max_prompt_tokens=200", "rl.micro_batch_tokens=30")
    outcome = plan("rl", *settings)
    assert outcome.code == 4, outcome.out
    assert "Raise micro_batch_tokens" in outcome.last_line
    assert plan("rl", *settings[:2], "rl.micro_batch_tokens=300").code == 0


OWN_COLLATOR = """
from skyrl_engine import UnsupportedError, hookimpl
from skyrl_engine_collators.padded.collator import PaddedCollator


class OnlyAlone(PaddedCollator):
    def plan(self, lengths, layout):
        if layout.micro_batch_rows != 1:
            raise UnsupportedError("rows stand alone", remedy="Set micro_batch_rows to 1")
        return super().plan(lengths, layout)


class Plugin:
    @hookimpl
    def skyrl_engine_make_collator(self, config, context):
        return OnlyAlone(pad_token_id=context.pad_token_id)


alone = Plugin()
"""


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_collator_of_somebody_else_is_asked_too(plan, trainer, tmp_path) -> None:
    (tmp_path / "alone.py").write_text(OWN_COLLATOR)
    outcome = plan(trainer, "collator.use=./alone.py:alone")
    assert outcome.code == 2
    assert "rows stand alone" in outcome.last_line


# --- keys that ask for what is not there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("key", ["every=1", "at_start=true"])
def test_an_evaluation_on_nothing_is_refused(plan, trainer, key) -> None:
    outcome = plan(trainer, f"evaluation.{key}")
    assert outcome.code == 2
    assert f"evaluation.{key.partition('=')[0]}: asks for evaluation, but" in outcome.last_line
    assert "held-out" in outcome.last_line


@pytest.mark.parametrize("trainer", [name for name in TRAINERS if name != "rl"])
@pytest.mark.parametrize("key", ["every=1", "at_start=true"])
def test_an_evaluation_on_empty_data_is_refused(plan, trainer, key) -> None:
    Path("empty.jsonl").write_text("")
    outcome = plan(trainer, f"evaluation.{key}", "data.eval=./empty.jsonl")
    assert outcome.code == 4
    assert "empty.jsonl" in outcome.last_line


def test_held_out_rows_without_anything_to_learn_are_refused_before_the_first_step(plan) -> None:
    rows = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}
    Path("nothing.jsonl").write_text(json.dumps(rows) + "\n")
    Path("tokens.jsonl").write_text(json.dumps(rows | {"loss_mask": [0, 1, 1]}) + "\n")
    outcome = plan("sft", "data.train=./tokens.jsonl", "data.eval=./nothing.jsonl")
    assert outcome.code == 4
    assert "nothing.jsonl" in outcome.last_line


def test_an_evaluation_on_held_out_tasks_is_planned(plan) -> None:
    assert plan("rl", "evaluation.every=1", "evaluation.at_start=true", "environments.0.eval_fraction=0.5").code == 0


@pytest.mark.parametrize(("size", "fewest", "code"), [(2, 3, 2), (2, 2, 0), (4, 3, 0)])
def test_more_attempts_than_a_group_has_are_refused(plan, size, fewest, code) -> None:
    outcome = plan("rl", f"rl.group_size={size}", f"rollouts.min_group_size={fewest}")
    assert outcome.code == code, outcome.err
    if code:
        assert "rollouts.min_group_size: is 3, and a group has rl.group_size = 2 attempts" in outcome.last_line


def test_groups_of_one_attempt_need_no_number(plan) -> None:
    assert plan("rl", "rl.preset=ppo", "rl.mini_batches=1").code == 0


@pytest.mark.parametrize("key", ["refresh_every=2", "path=./model", "precompute=true", "revision=main", "adapters_off=true"])
def test_a_reference_that_nobody_reads_is_refused(plan, key) -> None:
    for trainer, settings in (("rl", ()), ("preference", ("preference.preset=simpo",))):
        outcome = plan(trainer, f"reference.{key}", *settings)
        assert outcome.code != 0
        assert f"reference.{key.partition('=')[0]}" in outcome.err


def test_a_reference_that_is_read_may_be_refreshed(plan) -> None:
    assert plan("rl", "reference.refresh_every=2", "rl.kl.coef=0.1").code == 0


FLOATS = [
    (" ".join(path[1:]), option)
    for path, command in every_command(app, ("skyrl-engine",))
    for option in command.params
    if isinstance(option.type, (click.types.FloatParamType, click.FloatRange))
]


def test_numbers_are_asked_for() -> None:
    assert {"rollouts export", "evaluate", "rl", "sft"} <= {name for name, _ in FLOATS}


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("name", "option"), FLOATS, ids=lambda value: value if isinstance(value, str) else value.opts[0])
def test_no_option_takes_what_is_no_number(command, name, option, number) -> None:
    of_command = {
        "rollouts export": ["run", "--to", "jsonl", "--out", "x"],
        "diff-backends": ["--b", "fsdp"],
        "runs watch": ["run"],
        "chat": ["m"],
        "plugins index": ["."],
    }
    needed = of_command.get(name, ["--model", "m", *([] if name in ("evaluate", "rl", "distill") else ["--data", "d"])])
    outcome = command(*name.split(), *needed, f"{option.opts[0]}={number}")
    assert not math.isfinite(float(number))
    assert outcome.code == 2
    assert option.opts[0] in outcome.last_line


# --- all mistakes at once ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
def test_files_models_and_lengths_are_refused_together(plan, trainer) -> None:
    wrong = ["model.path=./nowhere", "run.device=cuda"]
    expected = ["./nowhere".removeprefix("."), "torch finds no CUDA device"]
    if trainer == "rl":
        wrong += [
            "environments.0.data=./absent.jsonl",
            "environments.0.reward=./absent.py:right",
            'rl.reward_models=[{path="./no_judge"}]',
        ]
        expected += ["absent.jsonl", "absent.py", "/no_judge"]
    else:
        wrong += ["data.train=./absent.jsonl", "data.eval=./absent_too.jsonl"]
        expected += ["absent.jsonl", "absent_too.jsonl"]
    if trainer == "sft":
        wrong, expected = [*wrong, "teacher.path=./no_teacher"], [*expected, "/no_teacher"]
    if trainer == "preference":
        wrong, expected = [*wrong, "reference.path=./no_reference"], [*expected, "/no_reference"]
    outcome = plan(trainer, *wrong)
    assert outcome.code != 0
    for words in expected:
        assert words in outcome.err
    assert "mistakes" in outcome.last_line
    assert len(outcome.err.splitlines()) > len(expected)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_plugin_that_is_not_there_is_refused_together_with_files(plan, trainer) -> None:
    data = "environments.0.data" if trainer == "rl" else "data.train"
    outcome = plan(trainer, "merger.use=no_merger", "loss.use=no_loss", "model.path=./nowhere", f"{data}=./absent.jsonl")
    for words in ("no_merger", "no_loss", "/nowhere", "absent.jsonl"):
        assert words in outcome.err


def test_data_of_two_splits_is_refused_together(plan) -> None:
    Path("a.jsonl").write_text('{"prompt": "a", "completion": 3}\n')
    Path("b.jsonl").write_text('{"prompt": "b", "completion": 4}\n')
    outcome = plan("sft", "data.train=./a.jsonl", "data.eval=./b.jsonl")
    assert outcome.code == 4
    assert "a.jsonl" in outcome.err
    assert "b.jsonl" in outcome.err


def test_two_environments_are_refused_together(plan) -> None:
    tables = "[{use='function', reward='./no.py:x', data='./tasks.jsonl'}, {use='function', reward='./reward.py:right', data='./none.jsonl'}]"
    outcome = plan("rl", f"environments={tables}", "rl.max_tokens=100000", "evaluation.at_start=true")
    for words in ("no.py", "none.jsonl", "positions"):
        assert words in outcome.err


# --- data preview ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_data_of_every_trainer_is_shown_or_refused_in_words(plan, command, trainer, split) -> None:
    outcome = command("data", "preview", f"{trainer}.toml", "--split", split)
    assert "unexpected" not in outcome.err
    if trainer == "rl":
        assert outcome.code == 2
        assert "takes tasks of environments" in outcome.last_line
        assert "--dry-run" in outcome.last_line
    elif split == "eval":
        assert outcome.code == 4
        assert "there is no evaluation data" in outcome.last_line
    else:
        assert outcome.code == 0


def test_data_that_a_teacher_scores_is_shown_without_its_column(plan, command, model) -> None:
    settings = (f"teacher.path={model}", "loss.terms=[{use='teacher_kl', coef=1.0}]")
    assert plan("sft", *settings).code == 0
    assert command("data", "preview", "sft.toml", *settings).code == 0
