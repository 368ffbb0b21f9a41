"""CPU time of a step of direct preference optimization, against TRL's DPOTrainer, references precomputed in both. One thread.

The same Qwen3 of 10 million random weights in float32 learns the same eight pairs in every step, in the same order, by
- the engine's `run_preference`: backend `fsdp` in the run's process, with the collator `packed`, and with `padded`, all eight pairs in one
  micro-batch, four and two at a time;
- DPOTrainer with its defaults, but in float32 and without recomputed activations, as the engine: all eight pairs in one micro-batch, four and
  two at a time, and without padding (`padding_free`). The fastest counts; of padded rows the same shapes are compared too.

Both take AdamW (fused), clip to the same norm, and report rewards, accuracies and log-probabilities of both halves. That both do the same
work is checked first: losses and gradient norms of all steps. Rounds are interleaved in one process. A run's figure is its CPU time from
the end of its first step to the end of its last, the least of all rounds; references are scored before the first step. Run with `nox -s
peers`; about five minutes.
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
SHORTEST, LONGEST = 12, 120
"""Words of a prompt, and of an answer."""

BAR = 0.85
"""Share of DPOTrainer's CPU time."""

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
        parameters = write_words_model(directory / "model")
        rows = make_pairs(STEPS * PAIRS)
        (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{machine()}, one thread, torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")
        print(f"Qwen3 of {parameters / 1e6:.1f}M parameters, float32; {STEPS} steps of {PAIRS} pairs; {ROUNDS} rounds")
        runs: dict[str, Callable[[], Course]] = {"engine, packed": partial(run_engine, directory, {"use": "packed"})}
        runs |= {
            f"engine, {pairs} pairs at once": partial(run_engine, directory, {"use": "padded"}, micro_batch_rows=2 * pairs)
            for pairs in AT_ONCE
        }
        runs |= {f"DPOTrainer, {pairs} pairs at once": partial(run_trl, directory, rows, pairs) for pairs in AT_ONCE}
        runs["DPOTrainer, padding_free"] = partial(run_trl, directory, rows, PAIRS, padding_free=True)
        courses: dict[str, list[Course]] = {run: [] for run in runs}
        for _ in range(ROUNDS):
            for run, train in runs.items():
                courses[run].append(train())
                gc.collect()
    report(courses)


def make_pairs(count: int) -> list[dict[str, str]]:
    """Prompts and two answers of random words, lognormal lengths."""
    draw = np.random.default_rng(1)

    def text() -> str:
        length = int(np.clip(draw.lognormal(np.log(40), 0.6), SHORTEST, LONGEST))
        return " ".join(f"w{word}" for word in draw.integers(2, VOCABULARY, length))

    return [{"prompt": text(), "chosen": f" {text()}", "rejected": f" {text()}"} for _ in range(count)]


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


def run_engine(directory: Path, collator: Mapping[str, Any], **training: Any) -> Course:
    with tempfile.TemporaryDirectory() as run:
        table = {
            "trainer": "preference",
            "model": {"path": str(directory / "model")},
            "data": {"train": str(directory / "pairs.jsonl"), "template": "none", "cache": f"{run}/cache"},
            "run": {"directory": f"{run}/run", "device": "cpu"},
            "reference": {"precompute": True},
            "loss": {"use": "dpo", "beta": BETA},
            "collator": dict(collator),
            "training": {"steps": STEPS, "batch_size": 2 * PAIRS, "shuffle": False, **training},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
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


def report(courses: Mapping[str, Sequence[Course]]) -> None:
    """Print every run's figure, how far its steps are from the engine's, and the bar."""
    seconds = {run: min((course.ends[-1] - course.ends[0]) / (STEPS - 1) for course in rounds) for run, rounds in courses.items()}
    expected = courses["engine, packed"][0]
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
    ours = {run: figure for run, figure in seconds.items() if run.startswith("engine")}
    padded = min((run for run in ours if run != "engine, packed"), key=lambda run: ours[run])
    for run in ("engine, packed", padded):
        print(
            f"{run}: {ours[run] / peers[fastest]:.3f} of the CPU time of {fastest} {compare_with_bar(ours[run] / peers[fastest], at_most=BAR)}"
        )
    for pairs in AT_ONCE:
        share = seconds[f"engine, {pairs} pairs at once"] / seconds[f"DPOTrainer, {pairs} pairs at once"]
        print(
            f"padded rows, {pairs} pairs at once: {share:.3f} of the CPU time of DPOTrainer {compare_with_bar(share, at_most=BAR)}"
        )


if __name__ == "__main__":
    main()
