"""Profile two steps of supervised fine-tuning with one backend and say what the trace shows.

python tests/running/step_profile.py fsdp --device cuda [--ranks 8] [--size 0.6b]
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from step_trace import TraceReading, read_trace

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.training.sft.trainer import run_sft

STEPS: Final = 2
SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {},
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
}
ROWS: Final = 32


def profile_steps(backend: str, folder: Path, *, device: str, ranks: int, size: str) -> list[TraceReading]:
    """Train in `folder` for a few steps with four micro-batches on each rank, and read each rank's trace of the last two."""
    model = folder / "model"
    write_model(model, **SIZES[size])
    write_tokenizer(model, ["some words"])
    length = 24 if size == "tiny" else 1000
    rows = [_make_row(length + number % 7) for number in range(ROWS * ranks)]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "backend": {"use": backend},
        "model": {"path": str(model), "dtype": "bfloat16" if device == "cuda" else "float32"},
        "data": {"train": str(data)},
        "training": {"steps": STEPS + 2, "batch_size": 8 * ranks},
        "evaluation": {"at_end": False},
        "run": {"directory": str(folder / "run"), "device": device, "ranks": ranks, "seed": 5, "profile_steps": STEPS},
    }
    run_sft(resolve(from_dict(config, "a profile of steps")))
    return [read_trace(path) for path in sorted((folder / "run" / "profile").glob("*.trace.json.gz"))]


def _make_row(length: int) -> dict[str, list[int]]:
    """Return a text of which the second half is learned."""
    ids = [3 + place % 29 for place in range(length)]
    return {"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("backend")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--size", choices=list(SIZES), default="0.6b")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-profile-") as folder:
        readings = profile_steps(options.backend, Path(folder), device=options.device, ranks=options.ranks, size=options.size)
    for rank, reading in enumerate(readings):
        print(f"{options.backend}, rank {rank} of {len(readings)}, per step:")
        print("\n".join(f"- {line}" for line in reading.describe(STEPS)))


if __name__ == "__main__":
    main()
