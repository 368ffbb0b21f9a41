"""Recipes of the real tinker-cookbook, unmodified and offline, against `skyrl-engine serve`; `nox -s tinker` installs the cookbook."""

import json
import os
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_engine.modeling.tiny import write_model, write_tokenizer

COOKBOOK = os.environ.get("TINKER_COOKBOOK")
"""A folder with the cookbook and what it imports in addition to this environment (`pip install --target`)."""

pytestmark = [
    pytest.mark.skipif(
        COOKBOOK is None, reason="NOT PROVED HERE: `nox -s tinker` installs the tinker-cookbook and runs its recipes"
    ),
    pytest.mark.timeout(600),
]

MODEL = "Qwen/Qwen3-8B"
"""A name that the cookbook knows; a folder of this name in the working directory stands for the hub's."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a tiny model and a data set under the names that recipes ask the hub for."""
    folder = tmp_path_factory.mktemp("cookbook")
    tokenizer = write_tokenizer(folder / MODEL, [string.printable], size=128)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder / MODEL)
    # with usual weights so small a model could not leave the uniform distribution by adapters: its head stays as it is
    write_model(folder / MODEL, tokenizer=tokenizer, initializer_range=0.3, max_position_embeddings=4096)
    data = folder / "HuggingFaceH4" / "no_robots"
    data.mkdir(parents=True)
    chats = [
        [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word}, {word}, {word}."}]
        for word in ("one", "two", "three", "four", "five", "six", "seven", "eight") * 4
    ]
    (data / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "serve.toml").write_text(f'[serve]\nsession_seconds = 15\n[serve.models]\n"{MODEL}" = "{MODEL}"\n')
    return folder


@pytest.fixture(scope="module")
def served(place: Path, serve: Callable[[Path], tuple[str, subprocess.Popen[str]]]) -> str:
    address, _ = serve(place)
    return address


@pytest.fixture
def start(place, served):
    """Start a recipe as its documentation says, in the working directory; its process, whose output is in a file of its name."""
    processes = []

    def start_recipe(*arguments: str) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": COOKBOOK,
            "TINKER_BASE_URL": served,
            "TINKER_API_KEY": "tml-test",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(place / "cache"),
        }
        with (place / "recipe.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        processes.append(process)
        return process

    yield start_recipe
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def run(place, start):
    """Run a recipe to its end, and return its metrics by step."""

    def run_recipe(log_path: str, *arguments: str) -> dict[int, dict]:
        process = start(*arguments)
        assert process.wait(500) == 0, (place / "recipe.log").read_text()[-6000:]
        return metrics(place / log_path)

    return run_recipe


def metrics(folder: Path) -> dict[int, dict]:
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row for row in rows if "step" in row}


def sl_loop(log_path: str) -> list[str]:
    options = {
        "log_path": log_path,
        "model_name": MODEL,
        "batch_size": 4,
        "max_steps": 7,
        "save_every": 2,
        "lora_rank": 4,
        "learning_rate": 1e-2,
    }
    return ["-m", "tinker_cookbook.recipes.sl_loop", *(f"{name}={value}" for name, value in options.items())]


def test_a_killed_supervised_loop_resumes_to_the_same_numbers(place, run, start):
    """sl_loop learns; another one is killed after its step 4 and started again, and each step has the numbers of the whole one."""
    whole = run("whole", *sl_loop("whole"))
    curve = [whole[step]["train_mean_nll"] for step in range(7)]
    assert curve[-1] < curve[0] - 0.3, curve
    process, deadline = start(*sl_loop("cut")), time.monotonic() + 300
    while 4 not in metrics(place / "cut") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert 6 not in metrics(place / "cut"), "it was done before it was killed"
    # the killed client's session still lives, and the next one waits for its end
    cut = run("cut", *sl_loop("cut"))
    assert "Resuming from batch 4" in (place / "recipe.log").read_text()
    for step in range(7):
        for number in ("train_mean_nll", "grad_norm"):
            assert cut[step][number] == whole[step][number], (step, number)


def test_reinforcement_of_arithmetic_runs_as_it_stands(run):
    options = ("env=arithmetic", "loss_fn=importance_sampling", "group_size=4", "groups_per_batch=4", "max_steps=2", "lora_rank=4")
    rows = run(
        "arithmetic",
        "-m",
        "tinker_cookbook.recipes.math_rl.train",
        f"model_name={MODEL}",
        "log_path=arithmetic",
        *options,
        "save_every=1",
        "eval_every=0",
    )
    assert len(rows) >= 2
    assert rows[0]["env/all/reward/total"] < 0


def test_a_game_of_several_turns_runs_as_it_stands(run):
    options = ("group_size=2", "batch_size=2", "max_tokens=8", "max_steps=1", "eval_every=0", "renderer_name=role_colon")
    rows = run(
        "guess",
        "-m",
        "tinker_cookbook.recipes.multiplayer_rl.guess_number.train",
        f"model_name={MODEL}",
        "log_path=guess",
        *options,
    )
    assert rows[0]["env/all/turns_per_episode"] == 10


def test_the_reward_of_an_environment_of_ones_own_climbs(run):
    rows = run("digits", str(Path(__file__).with_name("cookbook_digits.py")), MODEL, "digits", "12")
    rewards = [rows[step]["env/all/reward/total"] for step in range(12)]
    assert rewards[0] < 0.4, rewards
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3, rewards
    # the sampler's log-probabilities are the trainer's
    assert abs(rows[0]["optim/kl_sample_train_v2"]) < 1e-6, rows[0]
