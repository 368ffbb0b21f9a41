"""Reinforcement learns: from a warm start that answers in three ways, the one that is paid for takes over on words that nobody trained on."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.cli.demo.recipe import Exchange, write_exchanges
from skyrl_engine.cli.demo.tiny import make_model
from skyrl_engine.config import load, resolve
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.sft.trainer import run_sft

REWARD = """
def score(text, task):
    return float(text.strip() == task.data["answer"])
"""

WORDS, HELD_OUT, WARM_STEPS, STEPS = 3000, 200, 250, 120

TIS = [{"use": "tis"}]
RUNS: Mapping[str, Mapping[str, Any]] = {
    "in turns": {},
    "beside training, ratio to the policy that sampled": {"rl": {"staleness": 1}},
    "beside training, corrected": {"rl": {"staleness": 1, "old": "score"}, "loss": {"corrections": TIS}},
    "beside training, uncorrected": {"rl": {"staleness": 1, "old": "current"}},
    "on pairs": {"rl": {"preset": "online_dpo"}},
}
"""Keys of runs that learn the same task from equal numbers of samples."""


def words(seed: int) -> list[str]:
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < WORDS + HELD_OUT:
        found["".join(draw.choices("abcdefghij", k=draw.randint(4, 6)))] = None
    return list(found)


def question(word: str) -> str:
    return f"Write {word} another way"


def warm_start(folder: Path, seed: int) -> None:
    """Fine-tune a small model with random weights on answers of which a third each copy, sort and reverse the word."""
    draw, every = random.Random(seed), words(seed)
    train, held_out = every[:WORDS], every[WORDS:]
    ways = (str, lambda word: "".join(sorted(word)), lambda word: word[::-1])
    exchanges = [Exchange(question(word), phrase(word)) for word in train for phrase in ways]
    draw.shuffle(exchanges)
    make_model(folder / "model", exchanges)
    write_exchanges(folder / "sft.jsonl", exchanges)
    for name, part in (("train", train), ("held-out", held_out)):
        rows = [{"prompt": question(word), "answer": word[::-1]} for word in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    tables = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "sft.jsonl"), "cache": str(folder / "cache")},
        "training": {"steps": WARM_STEPS, "batch_size": 64, "micro_batch_rows": 64},
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 10},
        "run": {"directory": str(folder / "warm"), "seed": seed, "device": "cpu"},
    }
    run_sft(resolve(load(tables, [])))


def reinforce(folder: Path, seed: int, run: str) -> list[dict[str, float]]:
    """Pay for the reversed word alone; return greedy answers to held-out words and the mean reward, at the first and the last steps."""
    tables: dict[str, Any] = {
        "trainer": "rl",
        "model": {"path": str(folder / "warm" / "model")},
        "rl": {"steps": STEPS, "groups": 16, "group_size": 8, "max_tokens": 12, "max_prompt_tokens": 64},
        "environments": [
            {
                "use": "function",
                "reward": f"{folder / 'reward.py'}:score",
                "data": str(folder / "train.jsonl"),
                "eval_data": str(folder / "held-out.jsonl"),
            }
        ],
        "evaluation": {"at_start": True, "at_end": True, "samples": 1, "tasks": HELD_OUT, "temperature": 0.0},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 10},
        "run": {"directory": str(folder / run.replace(" ", "-")), "seed": seed, "device": "cpu"},
    }
    for name, keys in RUNS[run].items():
        tables[name] = {**tables.get(name, {}), **keys}
    directory = run_rl(resolve(load(tables, []))).directory
    records = read_metrics(directory / "metrics.jsonl")
    steps = [record["metrics"]["reward/mean"] for record in records if record["kind"] == "step"]
    exact = [record["metrics"]["evaluation/avg@1"] for record in records if record["kind"] == "evaluation"]
    return [{"exact": exact[0], "reward": sum(steps[:10]) / 10}, {"exact": exact[-1], "reward": sum(steps[-10:]) / 10}]


@pytest.fixture(scope="module", params=range(3))
def warm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a model after its warm start, and the seed of it."""
    folder: Path = tmp_path_factory.mktemp(f"seed-{request.param}")
    warm_start(folder, request.param)
    return folder, request.param


@pytest.mark.nightly
@pytest.mark.parametrize("run", list(RUNS))
def test_held_out_answers_become_twice_as_good(warm: tuple[Path, int], run: str) -> None:
    """docs/reference/reward-climbs.md shows what was measured."""
    folder, seed = warm
    before, after = reinforce(folder, seed, run)
    print(f"{run}, seed {seed}: {before} -> {after}")
    assert before["exact"] > 0.02, "the warm start contains the behaviour"
    assert after["exact"] >= 2 * before["exact"]
    assert after["reward"] > 1.5 * before["reward"]
