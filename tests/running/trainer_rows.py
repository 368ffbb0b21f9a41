"""Rows and a model for trainers that are proved: samples of several lengths, and a tiny Llama whose parts differ."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.proof.trainer_cuts import Row

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


def load_llama(folder: Path) -> Any:
    """Write the model into `folder`, and return it in float32."""
    from transformers import AutoModelForCausalLM

    write_model(folder, "llama")
    make_parts_differ(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
