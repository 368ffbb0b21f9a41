"""Tokens per second of training on one CUDA device in bfloat16: the engine by default, a bare torch loop, transformers' and TRL's trainers.

A Qwen3 of the published 0.6B's sizes with random weights, float32, computes in bfloat16.
- Chats: 4 steps of 32 chats of 128 to 2,048 tokens, half of each learned. `Trainer` pads its rows of 8 chats, as it does by default, and so
  does TRL's `SFTTrainer`; the bare loop computes one chat after the other under autocast. All take AdamW (fused) and clip.
- Groups: a GRPO step without sampling (scores of the old policy, forward, backward, AdamW) over 8 prompts of 2,048 tokens with 8 answers of
  256 each, by rows that compute each prompt once (`tree`, the default) and by packed rows.
- Compiled layers: the chats again, by the engine with `model.compile = true`.

Times are by the clock with synchronization, the least of the rounds, from the end of the first step; the share of peak is 6 operations per
parameter and real token against `--peak` (dense bfloat16, 989 TFLOP/s of an H100 or H200). `--device cpu` runs a tiny one, to try the program.
"""

import argparse
import gc
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from attrs import define, frozen
from measuring.trainer_options import PLAIN
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from skyrl_engine import Engine, hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import SampleColumns, StepFinished
from skyrl_engine.errors import EngineError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.training.sft.trainer import run_sft

LEARNING_RATE = 1e-5
MAX_NORM = 1.0
IGNORED = -100

Sample = dict[str, list[int]]


@frozen
class Size:
    """A model, and the work that it is given."""

    model: dict[str, Any]
    steps: int
    chats: int
    shortest: int
    longest: int
    rows_of_peers: int
    groups: int
    answers: int
    prompt: int
    answer: int


SIZES = {
    "cuda": Size(
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "initializer_range": 0.02,
        },
        *(4, 32, 128, 2048, 8),
        *(8, 8, 2048, 256),
    ),
    "cpu": Size({"head_dim": 16, "max_position_embeddings": 512}, *(3, 8, 16, 128, 4), *(2, 4, 64, 16)),
}


@frozen
class Course:
    """Seconds from the end of the first step to the end of the last, the loss of every step in nats per token, and the peak in bytes."""

    seconds: float
    losses: Sequence[float]
    peak: int


@define(eq=False)
class Clock:
    """The ends of a run's steps, which an engine's run and a Trainer's tell."""

    device: str
    ends: list[float]
    losses: list[float]

    def tick(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.losses.append(event.metrics["loss"])
        self.tick()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the model is kept for the next time; without it nothing is")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the device in bfloat16")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    size = SIZES[options.device]
    name = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
    with tempfile.TemporaryDirectory() as folder:
        directory = options.folder or Path(folder)
        if not (directory / "model" / "tokenizer.json").exists():
            write_model(directory / "model", **size.model)
            write_tokenizer(directory / "model", ["some words"])
        parameters = sum(parameter.numel() for parameter in load_model(directory, "cpu").parameters())
        print(
            f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; Qwen3 of {parameters / 1e6:.0f}M parameters"
        )
        compare_groups(directory, size, options.device, options.rounds)
        compare_chats(directory, size, options.device, options.rounds, parameters, options.peak)


def compare_chats(directory: Path, size: Size, device: str, rounds: int, parameters: int, peak: float) -> None:
    samples = make_chats(size)
    (directory / "train.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    padded = sum(size.rows_of_peers * max(row) for row in lengths.reshape(-1, size.rows_of_peers).tolist())
    print(f"chats of {lengths.min()} to {lengths.max()} tokens (mean {lengths.mean():.0f})")
    print(f"padding makes {padded / lengths.sum():.2f} times as many")
    runs: dict[str, Callable[[], Course]] = {
        "engine, by default": partial(run_engine, directory, size, device),
        "Trainer, padding": partial(run_trainer, directory, samples, size, device),
    }
    with suppress(ImportError):
        import trl

        runs[f"SFTTrainer of TRL {trl.__version__}"] = partial(run_trl, directory, samples, size, device)
    runs["bare torch loop"] = partial(run_loop, directory, samples, size, device)
    runs["engine, compiled"] = partial(run_engine, directory, size, device, compiles=True)
    courses: dict[str, list[Course]] = {}
    for _ in range(rounds):
        for run, train in runs.items():
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                started = time.perf_counter()
                courses.setdefault(run, []).append(train())
                print(f"{run}: {courses[run][-1].seconds:.2f} s of steps, {time.perf_counter() - started:.0f} s in all", flush=True)
            except (RuntimeError, EngineError, TypeError, ValueError) as error:
                print(f"{run}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    courses = {run: found for run, found in courses.items() if found}
    tokens = int(lengths[size.chats :].sum())
    first = min(course.seconds for course in courses["engine, by default"])
    for run, found in courses.items():
        least = min(course.seconds for course in found)
        share = 6 * parameters * tokens / least / (peak * 1e12)
        said = ", ".join(f"{loss:.4f}" for loss in (found[0].losses[0], found[0].losses[-1]))
        print(
            f"{run}: {tokens / least:,.0f} real tokens a second ({share:.1%} of peak), {first / least:.2f} of the engine by default; "
            f"peak {max(course.peak for course in found) / 2**30:.1f} GiB; losses {said}",
            flush=True,
        )


def make_chats(size: Size) -> list[Sample]:
    """Chats as token ids of lognormal lengths, of which the last half is learned."""
    numbers = np.random.default_rng(1)
    middle = np.log((size.shortest * size.longest) ** 0.5)
    vocabulary = size.model.get("vocab_size", 128)
    chats = []
    for length in (
        np.clip(numbers.lognormal(middle, 0.7, size.steps * size.chats), size.shortest, size.longest).astype(int).tolist()
    ):
        ids = numbers.integers(3, vocabulary, length).tolist()
        chats.append({"input_ids": ids, "labels": [IGNORED] * (length // 2) + ids[length // 2 :]})
    return chats


def load_model(directory: Path, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32, attn_implementation="sdpa")
    return model.to(device)


def find_peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def run_engine(directory: Path, size: Size, device: str, *, compiles: bool = False) -> Course:
    clock = Clock(device, [], [])
    with tempfile.TemporaryDirectory() as run:
        table: dict[str, Any] = {
            "model": {"path": str(directory / "model"), "compile": compiles},
            "data": {"train": str(directory / "train.jsonl"), "cache": str(directory / "cache")},
            "run": {"directory": f"{run}/run", "device": device},
            "training": {"steps": size.steps, "batch_size": size.chats, "shuffle": False},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
        }
        directory_of_run = run_sft(resolve(from_dict(table, "benchmark")), observers=[clock]).directory
        lines = (directory_of_run / "config.toml").read_text().splitlines()
        chosen = [line for line in lines if line.startswith(("micro_batch_tokens", "dtype"))]
    print("engine: " + ", ".join(chosen), flush=True)
    return Course(clock.ends[-1] - clock.ends[0], clock.losses, find_peak(device))


def run_loop(directory: Path, samples: Sequence[Sample], size: Size, device: str) -> Course:
    """Train one chat after the other, without padding, by torch alone."""
    model, clock = load_model(directory, device).train(), Clock(device, [], [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for start in range(0, len(samples), size.chats):
        batch = samples[start : start + size.chats]
        count = sum(label != IGNORED for sample in batch for label in sample["labels"])
        total = torch.zeros((), device=device)
        for sample in batch:
            ids, labels = (torch.tensor([sample[name]]).to(device, non_blocking=True) for name in ("input_ids", "labels"))
            first = len(sample["input_ids"]) // 2
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first + 1).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[0, first:], reduction="sum") / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.losses.append(float(total))
        clock.tick()
    return Course(clock.ends[-1] - clock.ends[0], clock.losses, find_peak(device))


class Ticks(TrainerCallback):
    """Tells a clock of a Trainer's steps and losses."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.clock.tick()

    def on_log(self, *arguments: Any, logs: Any = None, **options: Any) -> None:
        if "loss" in (logs or {}):
            self.clock.losses.append(float(logs["loss"]))


def list_options(size: Size, device: str, output: str) -> dict[str, Any]:
    return {
        **PLAIN,
        "use_cpu": device == "cpu",
        "bf16": device == "cuda",
        "output_dir": output,
        "max_steps": size.steps,
        "per_device_train_batch_size": size.rows_of_peers,
        "gradient_accumulation_steps": size.chats // size.rows_of_peers,
        "train_sampling_strategy": "sequential",
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_NORM,
        "remove_unused_columns": False,
        "logging_steps": 1,
    }


def finish_trainer(trainer: Any, device: str) -> Course:
    clock = Clock(device, [], [])
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Ticks(clock))
    trainer.train()
    return Course(clock.ends[-1] - clock.ends[0], clock.losses, find_peak(device))


def run_trainer(directory: Path, samples: Sequence[Sample], size: Size, device: str) -> Course:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    with tempfile.TemporaryDirectory() as output:
        options = TrainingArguments(**list_options(size, device, output))
        trainer = Trainer(
            load_model(directory, device), options, data_collator=DataCollatorForSeq2Seq(tokenizer), train_dataset=list(samples)
        )
        return finish_trainer(trainer, device)


def run_trl(directory: Path, samples: Sequence[Sample], size: Size, device: str) -> Course:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    with tempfile.TemporaryDirectory() as output:
        options = SFTConfig(**list_options(size, device, output), max_length=None)
        data = Dataset.from_list(list(samples))
        trainer = SFTTrainer(load_model(directory, device), options, train_dataset=data, processing_class=tokenizer)
        return finish_trainer(trainer, device)


def compare_groups(directory: Path, size: Size, device: str, rounds: int) -> None:
    numbers = np.random.default_rng(0)
    vocabulary, whole = size.model.get("vocab_size", 128), size.prompt + size.answer
    drawn = [numbers.integers(3, vocabulary, size.prompt) for _ in range(size.groups)]
    samples = [
        np.concatenate([prompt, numbers.integers(3, vocabulary, size.answer)]) for prompt in drawn for _ in range(size.answers)
    ]
    offsets = np.arange(len(samples) + 1, dtype=np.int64)
    columns = SampleColumns.create(
        input_ids=np.concatenate(samples),
        token_offsets=offsets * whole,
        action_offsets=offsets * size.answer,
        columns={
            "advantages": np.repeat(numbers.normal(size=len(samples)), size.answer).astype(np.float32),
            "old_logprobs": np.full(len(samples) * size.answer, -9.0, dtype=np.float32),
        },
        group_ids=np.arange(len(samples)) // size.answers,
    )
    found: dict[str, tuple[float, float, int]] = {}
    for layout in ("packed", "tree"):
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        table = {
            "model": {"path": str(directory / "model"), "dtype": "bfloat16" if device == "cuda" else "float32"},
            "collator": {"use": layout},
            "training": {"micro_batch_tokens": size.answers * whole},
            "optimizer": {"learning_rate": 1e-12},
            "run": {"launch": "inline", "device": device},
            "loss": {"use": "ppo"},
        }
        with Engine.open(table) as engine:
            norm = take_step(engine, columns)
            least = float("inf")
            for _ in range(rounds + 1):
                started = time.perf_counter()
                take_step(engine, columns)
                if device == "cuda":
                    torch.cuda.synchronize()
                least = min(least, time.perf_counter() - started)
            found[layout] = least, norm, engine.plan(columns).cut.dense_tokens
        print(
            f"groups, {layout}: {least:.3f} s a step, {found[layout][2]} tokens, gradient norm {norm:.6g}, {find_peak(device) / 2**30:.1f} GiB"
        )
    print(f"a step on rows of trees takes {found['tree'][0] / found['packed'][0]:.3f} of a packed one")


def take_step(engine: Engine, columns: SampleColumns) -> float:
    plan = engine.plan(columns)
    plan = plan.with_columns({"old_logprobs": engine.score(plan).result().fields["logprobs"]})
    for mini_batch in range(len(plan)):
        engine.forward_backward(plan, mini_batch)
    return engine.optim_step().result().grad_norm


if __name__ == "__main__":
    main()
