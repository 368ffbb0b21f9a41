"""The demo's second act: a model that answers in three ways learns from a reward alone which of them is paid.

The recipe (three habits in the warm start, one of them paid; groups of 8, learning rate 3e-4) selects a habit that is there already.
It is no proof that a reward teaches a skill, and the demo says so.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_engine.cli.demo.recipe import HELD_OUT_FILE, TRAIN_FILE, Exchange, write_exchanges
from skyrl_engine.visible import visible_line

if TYPE_CHECKING:
    from skyrl_engine.cli.demo.recipe import Examination

WARM_FILE, RL_FILE = "warm.toml", "rl.toml"
REWARD_FILE = "my_reward.py"
PAIRS_FILE = "pairs.jsonl"
SERVE_FILE = "serve.toml"
WARM_STEPS, RL_STEPS = 100, 50
SHOWN = 3
_SEED = 7
_SERVE = """\
# Written by `skyrl-engine demo`. Clients of the Tinker API ask for the demo's trained model by this name.
[serve.models]
"demo" = "./run/model"
"""
_REWARD = '''\
"""A reward of your own: change it and run it, there is nothing to install."""

import reasoning_gym

verifier = reasoning_gym.get_score_answer_fn("spell_backward")


def my_reward(text, task):
    """1 for the word spelled backward, and less the fewer of its letters are in place: reasoning-gym's own verifier."""
    return verifier(text, {"answer": task.data["answer"]})
'''


def prepare(directory: Path, training: Sequence[Exchange], held_out: Sequence[Exchange], steps: int | None) -> None:
    """Write the act's data, reward and two configurations into the demo's directory; `steps` replaces the lengths of both trainings."""
    from skyrl_engine.config.report import to_toml

    data = directory / "data"
    choice = random.Random(_SEED)  # noqa: S311 - a reproducible draw, no secret
    write_exchanges(
        data / f"habits-{TRAIN_FILE}", [Exchange(sample.question, choice.choice(habits(sample))) for sample in training]
    )
    for name, exchanges in ((TRAIN_FILE, training), (HELD_OUT_FILE, held_out)):
        rows = ({"key": habits(exchange)[1], "prompt": exchange.question, "answer": exchange.answer} for exchange in exchanges)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (data / f"tasks-{name}").write_text(text, encoding="utf-8")
    pairs = ({"prompt": sample.question, "chosen": sample.answer, "rejected": habits(sample)[1]} for sample in training)
    different = (pair for pair in pairs if pair["chosen"] != pair["rejected"])
    (data / PAIRS_FILE).write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in different), encoding="utf-8")
    (directory / SERVE_FILE).write_text(_SERVE, encoding="utf-8")
    (directory / REWARD_FILE).write_text(_REWARD, encoding="utf-8")
    for file, config in ((WARM_FILE, _warm(steps or WARM_STEPS)), (RL_FILE, _rl(steps or RL_STEPS))):
        header = f"# Written by `skyrl-engine demo`. Run it again: skyrl-engine run {visible_line(str(directory / file))}\n\n"
        (directory / file).write_text(header + to_toml(config), encoding="utf-8")


def habits(exchange: Exchange) -> tuple[str, str, str]:
    """Return what three habits answer: the word backward, which is right; the word as it stands; its letters in order."""
    word = exchange.question.rpartition(": ")[2]
    return exchange.answer, word, "".join(sorted(word))


def compare_answers(before: "Examination", after: "Examination") -> list[tuple[str, ...]]:
    """Return rows (question, before, reward, after, reward) of the first questions that were answered wrongly before, then of others."""
    wrong_first = sorted(range(len(before.questions)), key=lambda index: before.rewards[index] == 1.0)
    return [
        (
            before.questions[index],
            *(texts[index] for examination in (before, after) for texts in (examination.answers, _texts(examination.rewards))),
        )
        for index in wrong_first[:SHOWN]
    ]


def _texts(rewards: Sequence[float]) -> list[str]:
    return [f"{reward:.2f}" for reward in rewards]


def _warm(steps: int) -> dict[str, Any]:
    return {
        "model": {"path": "./run/model"},
        "data": {"train": f"./data/habits-{TRAIN_FILE}"},
        "training": {"steps": steps, "batch_size": 64},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": min(10, steps // 10)},
    }


def _rl(steps: int) -> dict[str, Any]:
    return {
        "trainer": "rl",
        "model": {"path": "./warm/model"},
        "rl": {
            "steps": steps,
            "groups": 16,
            "group_size": 8,
            "max_tokens": 16,
            "max_prompt_tokens": 64,
        },
        "environments": [
            {
                "use": "function",
                "reward": f"./{REWARD_FILE}:my_reward",
                "data": f"./data/tasks-{TRAIN_FILE}",
                "eval_data": f"./data/tasks-{HELD_OUT_FILE}",
            }
        ],
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": min(10, steps // 10)},
        "evaluation": {"at_start": True, "tasks": 200},
    }
