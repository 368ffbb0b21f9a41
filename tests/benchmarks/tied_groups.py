"""CPU time of an optimizer step over groups that are tied, with `skip_zero_gradients` and without: docs/adr/0044.

Eight groups of four attempts of 96 tokens, of which none, half or all have equal rewards, on a model of 8 layers of width 256 with a
vocabulary of 8,192, by PPO's loss and AdamW, with the metrics that `skyrl-engine rl` reports (entropy and distances between policies). The time
is that of `Engine.train`, plan excluded, on one thread. Run with `nox -s bench`.
"""

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine

from skyrl_engine import Engine
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.engine.plan import Plan
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

GROUPS, GROUP_SIZE, PROMPT, RESPONSE = 8, 4, 24, 72
VOCABULARY = 8192
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
}
BARS = {0: 1.05, GROUPS // 2: 0.75, GROUPS: 0.5}
"""Tied groups, and the CPU time of a step with the setting over that without it."""
ROUNDS = 5


def main() -> None:
    torch.set_num_threads(1)
    print(f"{machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, **SHAPE)
        write_tokenizer(directory, ["some words"])
        tables = {
            "model": {"path": name},
            "loss": {"use": "ppo"},
            "training": {"micro_batch_rows": 8},
            "run": {"device": "cpu"},
            "optimizer": {"learning_rate": 1e-6},
        }
        with Engine.open(tables) as engine:
            for tied, bar in BARS.items():
                columns = columns_with(range(tied))
                plans = {skip: engine.plan(columns, skip_zero_gradients=skip) for skip in (False, True)}
                times = interleave({str(skip): partial(step, engine, plan) for skip, plan in plans.items()}, ROUNDS)
                ratio = times["True"] / times["False"]
                print(
                    f"{tied} of {GROUPS} groups tied: {times['False']:.2f} CPU s with every gradient, {times['True']:.2f} s without those "
                    f"of 0, {ratio:.2f} of it {compare_with_bar(ratio, at_most=bar)}"
                )


def step(engine: Engine, plan: Plan) -> None:
    engine.train(plan, bound={"old_logprobs": "logprobs"}, watch={"policy", "entropy"})


def columns_with(tied: Sequence[int]) -> SampleColumns:
    draw = np.random.default_rng(0)
    count = GROUPS * GROUP_SIZE
    groups = np.repeat(np.arange(GROUPS), GROUP_SIZE)
    advantages = np.where(np.isin(groups, tied), 0.0, draw.normal(size=count))
    return SampleColumns.from_rollouts(
        prompts=[draw.integers(1, VOCABULARY, PROMPT) for _ in range(count)],
        responses=[draw.integers(1, VOCABULARY, RESPONSE) for _ in range(count)],
        logprobs=[np.full(RESPONSE, -9.0, np.float32)] * count,
        columns={"advantages": [np.full(RESPONSE, worth, np.float32) for worth in advantages]},
        group_ids=groups,
    )


if __name__ == "__main__":
    main()
