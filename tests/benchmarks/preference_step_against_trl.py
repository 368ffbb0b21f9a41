"""CPU time of a step of direct preference optimization, against TRL's DPOTrainer, references precomputed in both. One thread.

The same Qwen3 of 10 million random weights in float32 learns the same eight pairs in every step, in the same order, by
- the engine's `run_preference`: backend `fsdp` in the run's process, with the collator `packed`, and with `padded`, all eight pairs in one
  micro-batch, four and two at a time;
- DPOTrainer with its defaults, but in float32 and without recomputed activations, as the engine: all eight pairs in one micro-batch, four and
  two at a time, and without padding (`padding_free`). The fastest counts; of padded rows the same shapes are compared too.

Both take AdamW (fused), clip to the same norm, and report rewards, accuracies and log-probabilities of both halves. That both do the same
work is checked first: losses and gradient norms of all steps. Rounds are interleaved in one process. A run's figure is its CPU time from
the end of its first step to the end of its last, the least of all rounds; references are scored before the first step.

The engine also runs by default, which computes the prompt of a pair once. Then the same with prompts of 512 tokens and answers of 64.
Run with `nox -s peers`; about fifteen minutes.
"""

import gc
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import trl
from attrs import define, frozen
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine
from measuring.trainer_options import PLAIN
from measuring.words import VOCABULARY, load_model, write_words_model
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer

from skyrl_engine import hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import StepFinished
from skyrl_engine.training.preference.trainer import run_preference

ROUNDS, STEPS, PAIRS = 3, 3, 8
BETA, LEARNING_RATE, MAX_NORM = 0.1, 1e-4, 1.0


@frozen
class Shape:
    """The fewest and the most words of prompts and of answers, and which share of DPOTrainer's CPU time is the bar of a run."""

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    bars: Mapping[str, float]


PACKED, DEFAULT = "engine, packed", "engine, by default"
SHAPES = (
    Shape("ordinary pairs", (12, 120), (12, 120), {PACKED: 0.85, DEFAULT: 0.5}),
    Shape("prompts of 512 tokens", (512, 512), (64, 64), {DEFAULT: 0.30}),
)

AGREEMENT = 1e-3
"""Losses and gradient norms of all steps, relative; DPOTrainer's logs round to four digits."""

AT_ONCE = (PAIRS, 4, 2)
"""Pairs of a micro-batch of padded rows."""


@frozen
class Course:
    """One run: CPU time at the end of every step, in seconds, and of every step loss (nats) and gradient norm before clipping."""

    ends: Sequence[float]
    losses: Sequence[float]
    norms: Sequence[float]


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = write_words_model(directory / "model", positions=1024)
        print(f"{machine()}, one thread, torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")
        print(f"Qwen3 of {parameters / 1e6:.1f}M parameters, float32; {STEPS} steps of {PAIRS} pairs; {ROUNDS} rounds")
        for shape in SHAPES:
            compare(directory, shape)


def compare(directory: Path, shape: Shape) -> None:
    rows = make_pairs(STEPS * PAIRS, shape)
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs: dict[str, Callable[[], Course]] = {
        PACKED: partial(run_engine, directory, {"collator": {"use": "packed"}}),
        DEFAULT: partial(run_engine, directory, {}),
    }
    runs |= {
        f"engine, {pairs} pairs at once": partial(
            run_engine, directory, {"collator": {"use": "padded"}}, micro_batch_rows=2 * pairs
        )
        for pairs in AT_ONCE
    }
    runs |= {f"DPOTrainer, {pairs} pairs at once": partial(run_trl, directory, rows, pairs) for pairs in AT_ONCE}
    runs["DPOTrainer, padding_free"] = partial(run_trl, directory, rows, PAIRS, padding_free=True)
    courses: dict[str, list[Course]] = {run: [] for run in runs}
    for _ in range(ROUNDS):
        for run, train in runs.items():
            courses[run].append(train())
            gc.collect()
    print(f"{shape.name}:")
    report(courses, shape)


def make_pairs(count: int, shape: Shape) -> list[dict[str, str]]:
    """Prompts and two answers of random words, lognormal lengths."""
    draw = np.random.default_rng(1)

    def write_text(length_between: tuple[int, int]) -> str:
        length = int(np.clip(draw.lognormal(np.log(40), 0.6), *length_between))
        return " ".join(f"w{word}" for word in draw.integers(2, VOCABULARY, length))

    return [
        {
            "prompt": write_text(shape.prompt),
            "chosen": f" {write_text(shape.answer)}",
            "rejected": f" {write_text(shape.answer)}",
        }
        for _ in range(count)
    ]


@define(eq=False)
class Recorder:
    """An observer of the engine's run."""

    ends: list[float]
    losses: list[float]
    norms: list[float]

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.losses.append(event.metrics["loss"])
        self.norms.append(event.metrics["grad_norm"])
        self.ends.append(time.process_time())


def run_engine(directory: Path, tables: Mapping[str, Any], **training: Any) -> Course:
    with tempfile.TemporaryDirectory() as run:
        table = {
            "trainer": "preference",
            "model": {"path": str(directory / "model")},
            "data": {"train": str(directory / "pairs.jsonl"), "template": "none", "cache": f"{run}/cache"},
            "run": {"directory": f"{run}/run", "device": "cpu"},
            "reference": {"precompute": True},
            "loss": {"use": "dpo", "beta": BETA},
            "training": {"steps": STEPS, "batch_size": 2 * PAIRS, "shuffle": False, **training},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
            **tables,
        }
        recorder = Recorder([], [], [])
        run_preference(resolve(from_dict(table, "benchmark")), observers=[recorder])
    return Course(recorder.ends, recorder.losses, recorder.norms)


class Clock(TrainerCallback):
    """Keeps the end of every step, and what is logged of it."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.logs: list[Mapping[str, float]] = []

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.ends.append(time.process_time())

    def on_log(self, *arguments: Any, logs: Mapping[str, float], **options: Any) -> None:
        if "grad_norm" in logs:
            self.logs.append(dict(logs))


def run_trl(directory: Path, rows: Sequence[dict[str, str]], pairs: int, **settings: Any) -> Course:
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = DPOConfig(
            output_dir=output,
            max_steps=STEPS,
            per_device_train_batch_size=pairs,
            gradient_accumulation_steps=PAIRS // pairs,
            train_sampling_strategy="sequential",
            precompute_ref_log_probs=True,
            beta=BETA,
            max_length=None,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_NORM,
            logging_steps=1,
            **PLAIN,
            **settings,
        )
        trainer = DPOTrainer(
            load_model(directory / "model"),
            args=arguments,
            train_dataset=datasets.Dataset.from_list(list(rows)),
            processing_class=PreTrainedTokenizerFast.from_pretrained(directory / "model"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    return Course(clock.ends, [logs["loss"] for logs in clock.logs], [logs["grad_norm"] for logs in clock.logs])


def report(courses: Mapping[str, Sequence[Course]], shape: Shape) -> None:
    """Print every run's figure, how far its steps are from the engine's, and the bars."""
    seconds = {run: min((course.ends[-1] - course.ends[0]) / (STEPS - 1) for course in rounds) for run, rounds in courses.items()}
    expected = courses[PACKED][0]
    for run, rounds in courses.items():
        first = rounds[0]
        apart = max(
            float(np.abs(np.array(got) / np.array(right) - 1).max())
            for got, right in ((first.losses, expected.losses), (first.norms, expected.norms))
        )
        agreement = compare_with_bar(apart, at_most=AGREEMENT)
        print(
            f"{run}: {seconds[run]:.3f} CPU s a step; losses and gradient norms of all steps differ from packed by {apart:.1e} {agreement}"
        )
    peers = {run: figure for run, figure in seconds.items() if run.startswith("DPOTrainer")}
    fastest = min(peers, key=lambda run: peers[run])
    for run in (run for run in seconds if run.startswith("engine")):
        share = seconds[run] / peers[fastest]
        verdict = compare_with_bar(share, at_most=shape.bars[run]) if run in shape.bars else ""
        print(f"{run}: {share:.3f} of the CPU time of {fastest} {verdict}")
    for pairs in AT_ONCE:
        share = seconds[f"engine, {pairs} pairs at once"] / seconds[f"DPOTrainer, {pairs} pairs at once"]
        print(f"padded rows, {pairs} pairs at once: {share:.3f} of the CPU time of DPOTrainer")


if __name__ == "__main__":
    main()
