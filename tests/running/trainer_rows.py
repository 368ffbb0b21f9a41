"""Rows of each kind and a model for trainers that are proved: samples of several lengths, and a tiny Llama whose parts differ."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.proof.row_kinds import Row

LENGTHS = (4, 9, 6, 3, 8, 5)


def make_rows() -> list[Row]:
    """Six rows; the first two tokens of each are a prompt."""
    draw = np.random.default_rng(5)
    rows = []
    for length in LENGTHS:
        ids = draw.integers(1, 128, length).tolist()
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return rows


ROWS = make_rows()
TRAINED = sum(LENGTHS) - 2 * len(LENGTHS)


def make_preferences() -> list[Row]:
    """Six pairs, whose answers differ in length."""
    draw = np.random.default_rng(6)
    lengths = ((2, 5, 3), (4, 2, 6), (1, 7, 2), (3, 3, 3), (2, 1, 4), (5, 6, 2))
    return [
        {name: draw.integers(1, 128, length).tolist() for name, length in zip(PREFERENCE_FIELDS, own, strict=True)}
        for own in lengths
    ]


def make_rollouts() -> list[Row]:
    """Two prompts with four rollouts each."""
    draw = np.random.default_rng(7)
    prompts = [draw.integers(1, 128, length).tolist() for length in (3, 2)]
    return [
        {"prompt_ids": prompts[place // 4], "completion_ids": draw.integers(1, 128, length).tolist(), "reward": reward}
        for place, (length, reward) in enumerate(zip(COMPLETIONS, REWARDS, strict=True))
    ]


PREFERENCE_FIELDS = ("prompt_ids", "chosen_ids", "rejected_ids")
COMPLETIONS, REWARDS = (5, 2, 7, 3, 1, 6, 4, 2), (1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.25)
PREFERENCES, ROLLOUTS = make_preferences(), make_rollouts()


def load_llama(folder: Path) -> Any:
    """Write the model into `folder`, and return it in float32."""
    from transformers import AutoModelForCausalLM

    write_model(folder, "llama")
    make_parts_differ(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
