"""A tiny model with dropout, a small data set, and runs over them: everything real, everything on CPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.config import ResolvedConfig, from_dict, resolve
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

SAMPLES = 23

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.2,  # draws random numbers, which a resume must draw again
    "tie_word_embeddings": False,
}

Table = dict[str, Any]
Configure = Callable[..., ResolvedConfig]


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model/` and `train.jsonl`, `eval.jsonl`: sums of one-digit numbers."""
    directory = tmp_path_factory.mktemp("material")
    rows = [{"prompt": f"{first} + {second} =", "completion": f" {first + second}"} for first in range(6) for second in range(6)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:SAMPLES]))
    (directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[SAMPLES:]))
    tokenizer = write_tokenizer(directory / "model", [row["prompt"] + row["completion"] for row in rows])
    write_model(directory / "model", tokenizer=tokenizer, **SIZES)
    return directory


@pytest.fixture
def tables(material: Path, tmp_path: Path) -> Table:
    """A configuration of 3 mini-batches per epoch, the last one smaller, over 10 steps."""
    return {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl"), "eval": str(material / "eval.jsonl"), "cache": str(material / "cache")},
        "run": {"seed": 5, "device": "cpu"},
        "training": {"steps": 10, "batch_size": 8, "micro_batch_rows": 3},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "cosine"},
        "checkpoint": {"every": 3},
    }


@pytest.fixture
def configure(tables: Table, tmp_path: Path) -> Configure:
    """`configure("name", table={key: value})`: the resolved configuration of a run in `tmp_path / name`, with some keys changed."""

    def make(name: str = "run", **changes: Table) -> ResolvedConfig:
        merged = {key: dict(table) for key, table in tables.items()}
        merged["run"]["directory"] = str(tmp_path / name)
        for key, table in changes.items():
            merged[key] = {**merged.get(key, {}), **table}
        return resolve(from_dict(merged, "test"))

    return make


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`student/` and `teacher/`: tiny models of one vocabulary, the teacher surer of what it says."""
    folder = tmp_path_factory.mktemp("models")
    for name, settings in {
        "student": {"initializer_range": 0.05},
        "teacher": {"initializer_range": 0.3, "hidden_size": 48},
    }.items():
        write_model(
            folder / name, tokenizer=write_tokenizer(folder / name, ["one two three four five six seven eight"]), **settings
        )
    return folder
