"""Wall time for which two ranks wait for the controller between steps, with the next mini-batch made ahead and made in its turn.

A gap lasts from the last rank's answer to an optimizer step until the next pass is sent. Two actors of Ray train a tiny model on mini-batches
of 128 samples of 40 to 200 tokens, in the rows that the engine chooses, so that reading, cutting, weighing and placing a mini-batch takes the
controller a while. The figure is the median gap of a run, the least of several runs, of which each kind takes its turn. CPU time would not show
it: the work is the same, at another time. Run with `nox -s bench`.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from measuring.chosen import read_collator
from measuring.cpu_time import machine

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine.workers.messages import Message, RunPass, StepOptimizer
from skyrl_engine.workers.ray_transport import RayTransport

ROUNDS, STEPS, BATCH, SAMPLES = 2, 12, 128, 512
SHORTEST, LONGEST = 40, 200


class Gaps:
    """Seconds between the answer to each optimizer step and the next pass."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._answered: float | None = None

    def recording(self, send: Callable[..., Callable[[], list[Any]]]) -> Callable[..., Callable[[], list[Any]]]:
        """The transport's `send`, which tells when passes go and when steps are answered."""

        def record(transport: RayTransport, messages: Sequence[Message[Any]]) -> Callable[[], list[Any]]:
            if isinstance(messages[0], RunPass) and self._answered is not None:
                self.seconds.append(time.perf_counter() - self._answered)
                self._answered = None
            wait = send(transport, messages)

            def answered() -> list[Any]:
                answers = wait()
                if isinstance(messages[0], StepOptimizer):
                    self._answered = time.perf_counter()
                return answers

            return answered

        return record


def main() -> None:
    print(machine())
    gaps: dict[str, list[float]] = {"ahead": [], "in turn": []}
    steps: dict[str, list[float]] = {"ahead": [], "in turn": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_material(folder)
        for number in range(ROUNDS):
            for kind, medians in gaps.items():
                gap, step = train(folder, f"{kind}-{number}", ahead=kind == "ahead")
                medians.append(gap)
                steps[kind].append(step)
        print(f"{BATCH} samples of {SHORTEST} to {LONGEST} tokens, rows {read_collator(folder / 'ahead-0')}")
    for kind, medians in gaps.items():
        print(
            f"mini-batch made {kind}: ranks wait {min(medians) * 1e3:.1f} ms between steps of {min(steps[kind]) * 1e3:.0f} ms; "
            f"runs {', '.join(f'{seconds * 1e3:.1f}' for seconds in medians)}"
        )


def write_material(folder: Path) -> None:
    """A tiny model, and samples of random tokens."""
    words = [chr(ord("a") + letter) for letter in range(20)]
    tokenizer = write_tokenizer(folder / "model", words)
    write_model(folder / "model", tokenizer=tokenizer, hidden_size=16, intermediate_size=32, num_attention_heads=2,
                num_key_value_heads=1, head_dim=8, max_position_embeddings=512)  # fmt: skip
    draw = np.random.default_rng(3)
    with (folder / "train.jsonl").open("w") as file:
        for length in draw.integers(SHORTEST, LONGEST, SAMPLES):
            ids = draw.integers(4, len(tokenizer), int(length)).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def train(folder: Path, name: str, *, ahead: bool) -> tuple[float, float]:
    """The median gap and the median step of a run, in wall seconds."""
    tables = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "cache": str(folder / "cache")},
        "run": {"device": "cpu", "launch": "ray", "ranks": 2, "directory": str(folder / name)},
        "training": {"steps": STEPS, "batch_size": BATCH},
        "checkpoint": {"every": "none", "at_end": False},
        "evaluation": {"at_end": False},
    }
    gaps = Gaps()
    with patch.object(RayTransport, "send", gaps.recording(RayTransport.send)), patch.object(RayTransport, "concurrent", ahead):
        directory = run_sft(resolve(from_dict(tables, "benchmark"))).directory
    assert len(gaps.seconds) == STEPS - 1
    steps = [record["seconds"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
    return statistics.median(gaps.seconds), statistics.median(steps)


if __name__ == "__main__":
    main()
