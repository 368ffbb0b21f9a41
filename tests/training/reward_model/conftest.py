"""A tiny model without dropout, pairs of right and wrong sums, and runs over them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.config import ResolvedConfig, from_dict, resolve
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

PAIRS = [
    {"prompt": f"{first} + {second} =", "chosen": f" {first + second}", "rejected": f" {first + second + 1} or so"}
    for first in range(4)
    for second in range(4)
]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model/`, `train.jsonl`, `eval.jsonl`, and `single.jsonl`, the answers of `train.jsonl` one by one."""
    directory = tmp_path_factory.mktemp("pairs")
    single = [
        {"prompt": row["prompt"], "completion": row[half], "label": half == "chosen"}
        for row in PAIRS[:10]
        for half in ("chosen", "rejected")
    ]
    for name, rows in (("train", PAIRS[:10]), ("eval", PAIRS[10:]), ("single", single)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [row["prompt"] + row[half] for row in PAIRS for half in ("chosen", "rejected")]
    tokenizer = write_tokenizer(directory / "model", texts)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    write_model(directory / "model", tokenizer=tokenizer, max_position_embeddings=64, **sizes)
    return directory


Configure = Callable[..., ResolvedConfig]


@pytest.fixture
def configure(pairs: Path, tmp_path: Path) -> Configure:
    """`configure("name", table={key: value})`: a run of six steps of four pairs in `tmp_path / name`, with some keys changed."""

    def make(name: str = "run", **changes: Any) -> ResolvedConfig:
        tables: dict[str, Any] = {
            "trainer": "reward_model",
            "model": {"path": str(pairs / "model")},
            "data": {"train": str(pairs / "train.jsonl"), "eval": str(pairs / "eval.jsonl"), "cache": str(pairs / "cache")},
            "run": {"seed": 5, "device": "cpu", "directory": str(tmp_path / name)},
            "training": {"steps": 6, "batch_size": 8, "micro_batch_rows": 4},
            "optimizer": {"learning_rate": 1e-2},
        }
        for key, table in changes.items():
            tables[key] = {**tables.get(key, {}), **table} if isinstance(table, dict) else table
        return resolve(from_dict(tables, "test"))

    return make
