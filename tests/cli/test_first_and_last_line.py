"""The line before the model is loaded, and the last line of a command that trains: the next command, which runs as it is printed."""

import json
import shlex
import shutil
import sys

import pytest
from by_day import now

from skyrl_engine.cli import app
from skyrl_engine.cli.command import every_command
from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model
from skyrl_engine.engine.engine import Engine

LOADING = "loading the model ..."
REWARD = "def score(text, task):\n    return float(text == task.data.get('answer', task.data.get('completion')))\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Paths by name: a model, and rows for every trainer."""
    folder = tmp_path_factory.mktemp("inputs")
    numbers = [f"{number:03d}" for number in range(24)]
    make_model(folder / "model", [Exchange(f"Say {number}", number) for number in numbers])
    rows = {
        "tasks": [{"prompt": f"Say {number}", "answer": number} for number in numbers],
        "rows": [{"prompt": f"Say {number}", "completion": number} for number in numbers],
        "pairs": [{"prompt": f"Say {number}", "chosen": number, "rejected": number[::-1] + "0"} for number in numbers],
    }
    values = {"model": str(folder / "model")}
    for name, listed in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in listed))
        values[name] = str(path)
    return values


OWN = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_qwen3"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def mine(inputs, tmp_path):
    """The two files that stand for the reader's own in what is printed, in the folder where commands run."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    shutil.copy(inputs["tasks"], tmp_path / "tasks.jsonl")
    own = tmp_path / "own"
    shutil.copytree(inputs["model"], own)
    facts = json.loads((own / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (own / "config.json").write_text(json.dumps({**facts, "model_type": "own_qwen3", "auto_map": code}))
    (own / "own.py").write_text(OWN)
    return {**inputs, "own": str(own)}


SHORT = "--max-tokens 4 rl.max_prompt_tokens=64 --groups 2 --group-size 2 --steps 1"
TRAINED = {
    "sft": "sft --model {model} --data {rows} --steps 1 --batch-size 4 --output run",
    "sft with adapters": "sft --model {model} --data {rows} --steps 1 --batch-size 4 --lora 4 --output run",
    "sft, raw": "sft --model {model} --data {rows} --steps 1 --batch-size 4 --output run data.template=none",
    "preference": "preference --model {model} --data {pairs} --steps 1 --batch-size 4 --output run",
    "reward-model": "reward-model --model {model} --data {pairs} --steps 1 --batch-size 4 --output run",
    "reward-model with adapters": "reward-model --model {model} --data {pairs} --steps 1 --batch-size 4 --lora 4 --output run",
    "reward-model, a checkpoint alone": "reward-model --model {model} --data {pairs} --steps 1 --batch-size 4 --output run "
    "checkpoint.at_end=false checkpoint.every=1",
    "sft, a checkpoint alone": "sft --model {model} --data {rows} --steps 1 --batch-size 4 --output run "
    "checkpoint.at_end=false checkpoint.every=1",
    "sft, nothing kept": "sft --model {model} --data {rows} --steps 1 --batch-size 4 --output 'a run' checkpoint.at_end=false",
    "distill": f"distill --model {{model}} --teacher {{model}} --prompts {{tasks}} {SHORT} --output run",
    "distill on rows": "distill --model {model} --teacher {model} --data {rows} --steps 1 --batch-size 4 --output run",
    "rl": f"rl --model {{model}} --reward ./my_reward.py:score --data {{tasks}} {SHORT} --output run",
    "rl in a folder with a space": f"rl --model {{model}} --reward ./my_reward.py:score --data {{tasks}} {SHORT} --output 'a run'",
    "sft, code of the model's own": "sft --model {own} --data {rows} --steps 1 --batch-size 4 --output run model.trust_remote_code=true",
    "run": "run train.toml",
}
LONG = {"rl": ("--dry-run",)}
"""Options that shorten a command that is run as it is printed."""


def train(command, line, mine, tmp_path):
    (tmp_path / "train.toml").write_text(
        f'[model]\npath = "{mine["model"]}"\n[data]\ntrain = "{mine["rows"]}"\n[training]\nsteps = 1\nbatch_size = 4\n'
        '[run]\ndirectory = "./run"\n'
    )
    outcome = command(*shlex.split(line.format(**mine)))
    assert outcome.code == 0, outcome.err
    return outcome


def next_of(outcome):
    """Return the words of the command that the last line names."""
    assert outcome.last_line.startswith("next"), outcome.err
    program, *words = shlex.split(outcome.last_line.partition(": ")[2])
    assert program == "skyrl-engine"
    return words


def test_every_command_that_trains_is_held():
    """One that can plan is one that trains, but for the one that deletes."""
    commands = {path[1:]: subcommand for path, subcommand in every_command(app.app, ("skyrl-engine",))}
    training = {
        " ".join(path) for path, subcommand in commands.items() if any("--dry-run" in option.opts for option in subcommand.params)
    }
    assert training - {"dpo", "runs prune"} == {line.split()[0] for line in TRAINED.values()}


@pytest.mark.parametrize("name", now(TRAINED, "sft with adapters", "reward-model", "rl"))
def test_a_command_that_trains_names_the_next_one_which_runs_as_printed(command, mine, tmp_path, name):
    outcome = train(command, TRAINED[name], mine, tmp_path)
    assert outcome.err.count("\nnext") == 1
    words = next_of(outcome)
    if name in ("sft", "preference", "reward-model", "distill on rows", "run"):
        # the run's own rows have prompts, so they are the tasks
        assert words[words.index("--data") + 1] == mine["pairs" if name in ("preference", "reward-model") else "rows"]
        assert "tasks" not in outcome.last_line.partition(":")[0]
        assert ("my_reward.py" in outcome.last_line) == (name != "reward-model")
    again = command(*words, *LONG.get(words[0], ()))
    assert again.code == 0, again.err


def test_a_process_reward_model_is_asked_for_steps_as_it_was_trained(command, mine, tmp_path):
    row = {"prompt": "1+1*5?", "completions": ["1*5=5", "1+5=6"], "labels": [True, False]}
    (tmp_path / "steps.jsonl").write_text(4 * f"{json.dumps(row)}\n")
    line = "reward-model --preset steps --model {model} --data ./steps.jsonl --steps 1 --batch-size 4 --output run"
    words = next_of(train(command, f"{line} 'reward_model.step_separator=\" - \"'", mine, tmp_path))
    assert words[-2:] == ["rl.reward_models.0.steps=min", 'rl.reward_models.0.step_separator=" - "']
    again = command(*words, *LONG["rl"])
    assert again.code == 0, again.err


def test_recorded_rollouts_name_it_too(command, mine, tmp_path):
    train(command, TRAINED["rl"], mine, tmp_path)
    short = "rl.max_prompt_tokens=64 --max-tokens 4 --groups 2 --steps 1"
    outcome = train(command, f"rl --model {{model}} --rollouts run {short} --output again", mine, tmp_path)
    again = command(*next_of(outcome))
    assert again.code == 0, again.err


@pytest.mark.nightly
def test_a_run_that_has_done_its_steps_names_it_and_a_quiet_one_does_not(command, mine, tmp_path):
    train(command, TRAINED["run"], mine, tmp_path)
    assert command(*next_of(command("run", "train.toml", "checkpoint.resume=true"))).code == 0
    assert command("run", "train.toml", "checkpoint.resume=true", "--quiet").err == ""


LOADED = {name: line for name, line in TRAINED.items() if name in ("sft", "preference", "reward-model", "distill", "rl", "run")} | {
    "evaluate": "evaluate --model {model} --reward ./my_reward.py:score --data {tasks} --tasks 2 --max-tokens 4 rl.max_prompt_tokens=64",
    "evaluate a run": "evaluate run --reward ./my_reward.py:score --data {tasks} --tasks 2 --max-tokens 4 rl.max_prompt_tokens=64",
    "demo": "demo --only sft --steps 1 --output demo",
}


@pytest.fixture
def launches(monkeypatch):
    """A mark on stderr wherever ranks are started."""
    launch = Engine.launch

    def mark_launch(*arguments, **keywords):
        sys.stderr.write("\n(ranks start)\n")
        return launch(*arguments, **keywords)

    monkeypatch.setattr(Engine, "launch", mark_launch)


@pytest.mark.parametrize("name", now(LOADED, "sft", "rl"))
def test_loading_the_model_is_a_line_before_it_begins(command, mine, tmp_path, launches, name):
    if name == "evaluate a run":
        train(command, TRAINED["sft with adapters"], mine, tmp_path)
    outcome = train(command, LOADED[name], mine, tmp_path)
    before, mark, after = outcome.err.partition("(ranks start)")
    assert mark
    assert (before.count(LOADING), after.count(LOADING)) == (1, 0)


@pytest.mark.parametrize("name", now(["sft", "rl", "evaluate"], "rl"))
def test_on_a_terminal_it_stands_beside_a_bar_before_it_begins(command, mine, tmp_path, launches, monkeypatch, name):
    """Nothing of it is left to when another thread gets its turn. With --quiet it is not said."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    before, mark, _ = train(command, LOADED[name], mine, tmp_path).err.partition("(ranks start)")
    assert mark
    assert LOADING in before
    assert LOADING not in train(command, f"{LOADED[name]} --quiet".replace("--output run", "--output quiet"), mine, tmp_path).err


def test_an_evaluation_says_what_precedes_the_loading(command, mine, tmp_path, launches):
    """Adapters are merged into a whole model first."""
    train(command, TRAINED["sft with adapters"], mine, tmp_path)
    err = train(command, LOADED["evaluate a run"], mine, tmp_path).err
    assert 0 <= err.index("writing the checkpoint as a model ...") < err.index(LOADING)
