"""`run`, `sft`, `data preview` and `export` on a tiny model."""

import json
import re
import sys
import tomllib

import pytest

from skyrl_engine.cli.demo.recipe import Exchange, write_exchanges
from skyrl_engine.cli.demo.tiny import make_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model directory and a dataset of 24 exchanges."""
    folder = tmp_path_factory.mktemp("inputs")
    exchanges = [Exchange(f"Say {number:03d}", f"{number:03d}") for number in range(24)]
    make_model(folder / "model", exchanges)
    write_exchanges(folder / "data.jsonl", exchanges)
    return folder


@pytest.fixture
def config(inputs, tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(
        f'[model]\npath = "{inputs / "model"}"\n[data]\ntrain = "{inputs / "data.jsonl"}"\ncache = "./cache"\n'
        '[training]\nsteps = 2\nbatch_size = 8\n[run]\ndirectory = "./run"\n'
    )
    return path


def test_run_then_export(command, config, tmp_path):
    outcome = command("run", config)
    assert outcome.code == 0, outcome.err
    assert "2/2" in outcome.err
    last = [f"trained model: {tmp_path / 'run' / 'model'}", f"run directory: {tmp_path / 'run'}"]
    assert outcome.out.splitlines()[-2:] == last
    assert outcome.out.startswith("last step:\n")
    finished = command("run", config, "checkpoint.resume=true")
    assert finished.out.splitlines() == ["nothing to do: the run has done its 2 steps already", *last]
    exported = command("export", "run", "exported")
    assert (exported.code, exported.out) == (0, "model: exported\n"), exported.err
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "model" / "model.safetensors"
    ).read_bytes()
    again = command("export", "run", "exported")
    assert again.code == 4
    assert again.err.count("\n") == 1


def test_a_second_run_in_the_same_directory_is_refused(command, config):
    assert command("run", config, "--quiet").code == 0
    outcome = command("run", config)
    assert outcome.code == 2
    assert "already holds a run" in outcome.last_line


def test_dry_run_plans_and_writes_no_run(command, config, inputs, tmp_path):
    outcome = command("run", config, "--dry-run", "--reducer", "sum", "training.micro_batch_rows=3")
    assert outcome.code == 0, outcome.err
    assert "skyrl-engine-reducers:sum" in outcome.out
    assert "24 of 24 rows, 0 dropped" in outcome.out
    length = json.loads((inputs / "model" / "config.json").read_text())["max_position_embeddings"]
    assert ["length", "limit", f"{length:,}", "tokens"] in [line.split() for line in outcome.out.splitlines()]
    assert not (tmp_path / "run").exists()
    rows = [line.split() for line in outcome.out.splitlines()[-3:]]
    assert sum(int(row[-1]) for row in rows) == 8


def test_the_plan_counts_what_lora_adapts(command, config):
    planned = command("run", config, "--dry-run", "model.lora.targets=['q_proj']")
    assert planned.code == 0, planned.err
    words = " ".join(planned.out.split())
    assert re.search(r"adapters q_proj \(\d\); frozen stay mlp.down_proj \(\d\), ", words)
    refused = command("run", config, "--dry-run", "model.lora.targets=['no_such']")
    assert refused.code != 0
    assert "'no_such', which no linear layer" in refused.last_line


def test_ranks_that_share_cores_are_planned_with_the_numbers_or_refused(command, config, monkeypatch):
    """Nothing starts: the machine's cores are known before."""
    monkeypatch.setattr("skyrl_engine.engine.cpu_check.usable_cores", lambda: 1)
    ranks = ("run.launch=ray", "training.micro_batch_rows=1")
    planned = command("run", config, "--dry-run", *ranks, "run.ranks=4")
    assert planned.code == 0, planned.err
    assert "4 ranks share 1 core" in " ".join(planned.out.split())
    refused = command("run", config, "--dry-run", *ranks, "run.ranks=8")
    assert refused.code == 2
    assert "8 ranks share 1 core: at most 4 ranks per core" in refused.last_line
    meant = command("run", config, "--dry-run", *ranks, "run.ranks=8", "run.oversubscribe=true")
    assert meant.code == 0, meant.err


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_layout_that_does_not_divide_the_model_is_refused_before_anything_starts(command, config, tmp_path, flags):
    """Code 2 as for other plans that cannot be. That the data is missing is reported too."""
    layout = ("run.launch=ray", "run.ranks=3", "backend.tensor_parallel=3")
    outcome = command("run", config, *flags, *layout, "data.train=./none.jsonl")
    assert (outcome.code, outcome.out) == (2, "")
    assert "backend.tensor_parallel = 3 does not divide num_attention_heads = " in outcome.err
    assert "none.jsonl" in outcome.err
    assert not (tmp_path / "run").exists(), "a run that is refused before it starts leaves no directory"
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


def test_quiet_prints_no_progress(command, config):
    outcome = command("run", config, "--quiet")
    assert (outcome.code, outcome.err) == (0, "")


def test_sft_prints_a_configuration_that_runs_the_same(command, inputs, tmp_path):
    outcome = command(
        *("sft", "--model", inputs / "model", "--data", inputs / "data.jsonl", "--steps", "2", "--batch-size", "8"),
        *("--output", "first", "--learning-rate", "0.001", "data.cache=./cache", "--loss", "cross_entropy"),
    )
    assert outcome.code == 0, outcome.err
    text = outcome.out
    config = tomllib.loads(text)
    assert "last step:" in outcome.err
    assert "run directory: first" in outcome.err
    assert config["optimizer"] == {"learning_rate": 0.001}
    assert config["loss"] == {"use": "cross_entropy"}
    (tmp_path / "made.toml").write_text(text)
    assert command("run", "made.toml", "run.directory=second").code == 0
    first, second = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[2])["metrics"]["loss"]
        for name in ("first", "second")
    )
    assert first == second


@pytest.mark.parametrize("flags", [["--dry-run"], ["--steps", "1"]])
def test_stdout_of_sft_is_a_configuration_and_nothing_else(command, inputs, tmp_path, flags):
    """`sft ... > my.toml` is kept and run again, whatever a plugin prints while it works."""
    (tmp_path / "loud.py").write_text(
        "from skyrl_engine import loss\nprint('imported')\n"
        "@loss(needs=('logprobs',))\ndef loud(tokens, config):\n    print('called')\n    return -tokens.logprobs\n"
    )
    arguments = ("--model", inputs / "model", "--data", inputs / "data.jsonl", "--batch-size", "8", "data.cache=./cache")
    outcome = command("sft", *arguments, "--loss", "./loud.py:loud", "--output", "run", *flags)
    assert outcome.code == 0, outcome.err
    (tmp_path / "my.toml").write_text(outcome.out)
    assert tomllib.loads(outcome.out)["loss"] == {"use": "./loud.py:loud"}
    assert "imported" in outcome.err
    assert ("24 of 24 rows" if "--dry-run" in flags else "called") in outcome.err
    again = command("run", "my.toml", "run.directory=again", "--dry-run")
    assert again.code == 0, again.err
    assert "24 of 24 rows" in again.out


def test_sft_needs_model_and_data(command):
    outcome = command("sft", "--model", "m")
    assert outcome.code == 2
    assert "--data" in outcome.last_line


def test_a_problem_with_an_option_names_the_option(command, inputs):
    outcome = command("sft", "--model", inputs / "model", "--data", inputs / "data.jsonl", "--steps", "0")
    assert outcome.code == 2
    assert "--steps" in outcome.last_line


def test_missing_data_is_code_4_and_one_line(command, inputs):
    outcome = command("sft", "--quiet", "--model", inputs / "model", "--data", "./none.jsonl")
    assert outcome.code == 4
    assert outcome.err.count("\n") == 1
    assert "none.jsonl" in outcome.err


def test_preview_marks_what_carries_loss(command, inputs):
    arguments = ("data", "preview", "--model", inputs / "model", "--data", inputs / "data.jsonl", "data.cache=./cache")
    outcome = command(*arguments, "--samples", "1")
    assert outcome.code == 0, outcome.err
    assert "«000<|im_end|>»" in outcome.out
    assert "24 of 24 rows" in outcome.out
    assert "\n\n\n" not in outcome.out
    seen = json.loads(command(*arguments, "--samples", "2", "--json").out)
    assert [sample["row"] for sample in seen["samples"]] == [0, 1]
    assert seen["counts"]["loss_tokens"] == 24 * 4
    assert sum(bucket["samples"] for bucket in seen["histogram"]) == 24


def test_preview_writes_out_what_would_move_the_cursor(command, inputs, tmp_path):
    exchanges = [Exchange("up\x1b[2J\r\u202e", "joined \U0001f469\u200d\U0001f467 ok")]
    write_exchanges(tmp_path / "odd.jsonl", exchanges)
    outcome = command("data", "preview", "--model", inputs / "model", "--data", tmp_path / "odd.jsonl", "data.cache=./cache")
    assert outcome.code == 0, outcome.err
    assert "up\\x1b[2J\\r\\u202e<|im_end|>" in outcome.out
    assert "joined \U0001f469\u200d\U0001f467 ok" in outcome.out


def test_an_interrupted_run_says_how_to_go_on(command, config, monkeypatch, tmp_path):
    from pathlib import Path

    from skyrl_engine.training.sft.trainer import RunResult

    monkeypatch.setattr(
        "skyrl_engine.training.sft.trainer.run_sft", lambda *_, **__: RunResult(Path("a run"), 1, {"loss": 1.0}, "SIGINT")
    )
    outcome = command("run", config)
    assert outcome.code == 130
    assert outcome.last_line == "    skyrl-engine run 'a run'/config.toml run.directory='a run' checkpoint.resume=true"


def test_a_resume_that_is_not_exact_says_so_to_the_person(command, config):
    assert command("run", config, "--quiet", "training.steps=1").code == 0
    outcome = command("run", config, "checkpoint.resume=true", "run.seed=9")
    assert outcome.code == 0, outcome.err
    warnings = [line for line in outcome.err.splitlines() if line.startswith("warning: ")]
    assert any("run.seed: 0 -> 9" in line for line in warnings), outcome.err


def test_a_dry_run_refuses_the_resume_that_the_run_would_refuse(command, config):
    held_out = "data.eval_fraction=0.2"
    assert command("run", config, "--quiet", "training.steps=1", held_out).code == 0
    assert command("run", config, "--dry-run", "checkpoint.resume=true", held_out).code == 0
    settings = ("checkpoint.resume=true", held_out, "run.seed=9")
    planned, ran = command("run", config, "--dry-run", *settings), command("run", config, *settings)
    assert (planned.code, planned.last_line) == (ran.code, ran.last_line)
    assert "the seed chooses which samples are held out" in planned.last_line


@pytest.mark.parametrize(
    ("option", "cause"),
    [
        (["--lr", "1e-4"], "There is no option --lr. Did you mean --learning-rate?"),
        (["--output_dir", "x"], "There is no option --output_dir. Did you mean --output?"),
        (
            ["--per_device_train_batch_size", "2"],
            "There is no option --per_device_train_batch_size. Did you mean --micro-batch-rows (it counts the rows a rank computes at once)?",
        ),
        (
            ["--weight-decay", "0.1"],
            "There is no option --weight-decay. Set optimizer.weight_decay: write optimizer.weight_decay=VALUE.",
        ),
        (["--resume"], "There is no option --resume. Set checkpoint.resume: write checkpoint.resume=true."),
        (["--save_steps=5"], "There is no option --save_steps. Set checkpoint.every: write checkpoint.every=VALUE."),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_ours(command, option, cause):
    outcome = command("sft", "--model", "m", "--data", "d", *option)
    assert outcome.code == 2
    assert outcome.last_line == f"error: {cause} See `skyrl-engine sft --help`."


def test_a_configuration_given_to_sft_is_answered_with_run(command, config):
    outcome = command("sft", str(config))
    assert outcome.code == 2
    refusal = f"error: {config} is a configuration, and sft makes its own: write `skyrl-engine run {config}`."
    assert outcome.last_line == f"{refusal} See `skyrl-engine sft --help`."


def test_data_given_twice_is_read_one_after_the_other(command, tmp_path, inputs):
    (tmp_path / "a.csv").write_text("question,answer\n1,2\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"question": "3", "answer": "4"}\n', encoding="utf-8")
    names = ("data.map.prompt=question", "data.map.response=answer")
    files = ("--data", str(tmp_path / "a.csv"), "--data", str(tmp_path / "b.jsonl"))
    outcome = command("data", "preview", "--model", str(inputs / "model"), *files, *names, "--json")
    assert outcome.code == 0, outcome.err
    seen = json.loads(outcome.out)
    assert (seen["format"], seen["counts"]["samples"]) == ("prompt_completion", 2)
