"""Share of a training step's CPU time that is the engine's own work, by the run's own breakdown: bar 5 %.

A 10M-parameter Qwen3 takes 20 steps of 8 short samples, in this process, in the rows that the engine chooses. `other` is the controller's CPU
time that no span claims. The figure is the least of several runs; what this does not cover is loading, and the cost of processes other than the
run's own (Ray's). Run with `nox -s bench`.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from measuring.bars import compare_with_bar
from measuring.chosen import read_collator
from measuring.cpu_time import machine
from safetensors.torch import load_file

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.training.sft.trainer import run_sft

RUNS, STEPS, SAMPLES = 3, 20, 8
MOST = 0.05
ENGINE_SPANS = frozenset({"plan", "reduce", "dispatch", "build", "objective", "merge", "observe", "data", "other"})
MODEL_SPANS = frozenset({"model", "optimizer"})
SIZES = {
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def read_steps(metrics: Path) -> list[dict[str, float]]:
    """CPU seconds by span of every step in a run's metrics.jsonl."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["cpu_seconds"] for record in records if record["kind"] == "step"]


def share_of_engine(steps: Sequence[Mapping[str, float]]) -> float:
    """Seconds of the engine's spans over those of all spans."""
    engine = sum(step.get(name, 0.0) for step in steps for name in ENGINE_SPANS)
    return engine / sum(sum(step.values()) for step in steps)


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            {"prompt": f"{first} + {second} =", "completion": f" {first + second}"} for first in range(6) for second in range(6)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = write_tokenizer(folder / "model", [row["prompt"] + row["completion"] for row in rows])
        write_model(folder / "model", tokenizer=tokenizer, **SIZES)
        parameters = sum(weight.numel() for weight in load_file(folder / "model" / "model.safetensors").values())
        runs = [train(folder, number) for number in range(RUNS)]
        collator = read_collator(folder / "run-0")
    least = min(runs, key=share_of_engine)
    share, milliseconds = share_of_engine(least), sum(sum(step.values()) for step in least) / STEPS * 1e3
    print(
        f"engine's part of a step: {share:.2%} of {milliseconds:.0f} ms CPU, {parameters / 1e6:.1f}M parameters, rows {collator} "
        f"{compare_with_bar(share, at_most=MOST)}; runs {', '.join(f'{share_of_engine(steps):.2%}' for steps in runs)}"
    )
    spans = {name: sum(step.get(name, 0.0) for step in least) / STEPS * 1e3 for name in sorted(ENGINE_SPANS)}
    print("ms per step:", ", ".join(f"{name} {value:.2f}" for name, value in spans.items()))


def train(folder: Path, number: int) -> list[dict[str, float]]:
    """Train for some steps; CPU seconds by span of each."""
    tables = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "cache": str(folder / "cache")},
        "run": {"device": "cpu", "directory": str(folder / f"run-{number}")},
        "training": {"steps": STEPS, "batch_size": SAMPLES},
        "checkpoint": {"every": "none", "at_end": False},
        "evaluation": {"at_end": False},
    }
    return read_steps(run_sft(resolve(from_dict(tables, "benchmark"))).directory / "metrics.jsonl")


if __name__ == "__main__":
    main()
