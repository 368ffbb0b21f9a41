"""A tiny model without dropout, pairs of right and wrong sums, and runs over them by a trainer that takes pairs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_engine import hookimpl
from skyrl_engine.config import ResolvedConfig, from_dict, resolve
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

PAIRS = [
    {"prompt": f"{first} + {second} =", "chosen": f" {first + second}", "rejected": f" {first + second + 1} or so"}
    for first in range(4)
    for second in range(4)
]

Configure = Callable[..., ResolvedConfig]


def write_pairs(directory: Path) -> Path:
    """Write `model/`, `train.jsonl`, `eval.jsonl`, and `single.jsonl`, the answers of `train.jsonl` one by one."""
    single = [
        {"prompt": row["prompt"], "completion": row[half], "label": half == "chosen"}
        for row in PAIRS[:10]
        for half in ("chosen", "rejected")
    ]
    directory.mkdir(exist_ok=True)
    for name, rows in (("train", PAIRS[:10]), ("eval", PAIRS[10:]), ("single", single)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [row["prompt"] + row[half] for row in PAIRS for half in ("chosen", "rejected")]
    tokenizer = write_tokenizer(directory / "model", texts)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    write_model(directory / "model", tokenizer=tokenizer, max_position_embeddings=64, **sizes)
    return directory


def runs_over(pairs: Path, trainer: str, folder: Path) -> Configure:
    """`configure("name", table={key: value})`: a run of six steps of four pairs in `folder / name`, with some keys changed."""

    def make(name: str = "run", **changes: Any) -> ResolvedConfig:
        tables: dict[str, Any] = {
            "trainer": trainer,
            "model": {"path": str(pairs / "model")},
            "data": {"train": str(pairs / "train.jsonl"), "eval": str(pairs / "eval.jsonl"), "cache": str(pairs / "cache")},
            "run": {"seed": 5, "device": "cpu", "directory": str(folder / name)},
            "training": {"steps": 6, "batch_size": 8, "micro_batch_rows": 4},
            "optimizer": {"learning_rate": 1e-2},
        }
        for key, table in changes.items():
            tables[key] = {**tables.get(key, {}), **table} if isinstance(table, dict) else table
        return resolve(from_dict(tables, "test"))

    return make


class EndedError(Exception):
    """Ends a run in the middle."""


class Ending:
    """An observer that ends the run after its third step."""

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == 3:
            raise EndedError
