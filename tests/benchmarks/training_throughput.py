"""Real tokens per CPU second of supervised fine-tuning, against Hugging Face Trainer, with one thread.

The same 10M-parameter Qwen3 learns the same chats in the same order, by
- the engine: collator `packed`, backend `fsdp`, one rank in this process;
- Trainer with padding: `DataCollatorForSeq2Seq` beside torch's scaled dot-product attention;
- Trainer with flattening: `DataCollatorWithFlattening` beside the same attention. flash-attention, which that collator is made for, does
  not run on CPU; transformers finds the documents by their positions and builds a mask of the whole row instead. It keeps the documents
  apart, which is checked first, and costs the square of the row;
- Trainer with flattening, one chat at a time, accumulating gradients: neither padding nor mask, the fastest Trainer we found on CPU.

All take AdamW (fused), clip to the same norm and average the loss over the mini-batch's loss-carrying tokens. Rounds are interleaved in one
process. A run's figure is its CPU time from the end of its first step to the end of its last: loading and warming up do not count; data,
optimizer and bookkeeping do. Run with `nox -s peers`; about three minutes.
"""

import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from attrs import define, frozen
from measuring.bars import beside
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from skyrl_engine import hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.training.sft.trainer import run_sft

ROUNDS, STEPS, BATCH = 3, 5, 8
SHORTEST, LONGEST = 36, 503
VOCABULARY = 8192
BAR = 1.0
"""As many tokens as the fastest of them."""
LEARNING_RATE, MAX_NORM = 1e-3, 1.0


@frozen
class Course:
    """One training run: CPU time at the end of every step, in seconds, and the loss of every step, in nats per token."""

    ends: Sequence[float]
    losses: Sequence[float]


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tokenizer, parameters = save_model(directory / "model")
        samples = make_samples(STEPS * BATCH)
        (directory / "train.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        describe(samples, parameters)
        check_flattened_documents(directory / "model", samples)

        trainer = partial(run_trainer, directory, samples)
        padding = DataCollatorForSeq2Seq(tokenizer)
        flattening = DataCollatorWithFlattening()
        runs: dict[str, Callable[[], Course]] = {
            "engine, packed": lambda: run_engine(directory),
            "Trainer, padding": lambda: trainer(padding, BATCH),
            "Trainer, flattening": lambda: trainer(flattening, BATCH),
            "Trainer, flattening, one chat at a time": lambda: trainer(flattening, 1),
        }
        courses: dict[str, list[Course]] = {run: [] for run in runs}
        for _ in range(ROUNDS):
            for run, train in runs.items():
                courses[run].append(train())
                gc.collect()
    report(samples, courses)


def save_model(directory: Path) -> tuple[PreTrainedTokenizerFast, int]:
    """A Qwen3 with random weights, proportioned like the published small ones (head about a fifth of it), and a tokenizer that only pads."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<end>",
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    model.save_pretrained(directory)
    return tokenizer, sum(parameter.numel() for parameter in model.parameters())


def make_samples(count: int) -> list[dict[str, list[int]]]:
    """Chats as token ids: lognormal lengths, the last 40 to 70% of each the response, which alone carries loss."""
    generator = np.random.default_rng(1)
    samples = []
    for length in np.clip(generator.lognormal(np.log(160), 0.6, count), SHORTEST, LONGEST).astype(int):
        tokens = (generator.zipf(1.3, length) % (VOCABULARY - 2) + 2).tolist()  # uneven, so that there is something to learn
        prompt = int(length * generator.uniform(0.3, 0.6))
        samples.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return samples


def describe(samples: Sequence[dict[str, list[int]]], parameters: int) -> None:
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    padded = sum(BATCH * max(batch) for batch in lengths.reshape(STEPS, BATCH).tolist())
    print(
        f"{processor()}, {os.cpu_count()} CPUs, one thread, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    print(
        f"Qwen3 of {parameters / 1e6:.1f}M parameters, float32; {STEPS} steps of {BATCH} chats of {lengths.min()} to {lengths.max()} tokens "
        f"(mean {lengths.mean():.0f}); padding makes {padded / lengths.sum():.2f} times as many; {ROUNDS} rounds"
    )


@torch.no_grad()
def check_flattened_documents(model_directory: Path, samples: Sequence[dict[str, list[int]]]) -> None:
    """Say whether the second of two flattened documents changes with the first, without a cache as in training."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    first, second = samples[0], samples[1]
    other = {"input_ids": first["input_ids"][::-1], "labels": first["labels"]}
    flatten = DataCollatorWithFlattening()
    behind = slice(len(first["input_ids"]), None)
    logits = [model(**flatten([each, second]), use_cache=False).logits[0, behind] for each in (first, other)]
    difference = (logits[0] - logits[1]).abs().max().item()
    print(f"flattened documents beside sdpa: the second changes by {difference:.1e} with the first (0: they are kept apart)")


@define(eq=False)
class Recorder:
    """An observer of the engine's run."""

    ends: list[float]
    losses: list[float]

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.losses.append(event.metrics["loss"])
        self.ends.append(time.process_time())


def run_engine(directory: Path) -> Course:
    with tempfile.TemporaryDirectory() as run:
        table = {
            "model": {"path": str(directory / "model")},
            "data": {"train": str(directory / "train.jsonl"), "cache": str(directory / "cache")},
            "run": {"directory": f"{run}/run", "device": "cpu"},
            "collator": {"use": "packed"},
            "training": {"steps": STEPS, "batch_size": BATCH, "shuffle": False},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
        }
        recorder = Recorder([], [])
        run_sft(resolve(from_dict(table, "benchmark")), observers=[recorder])
    return Course(recorder.ends, recorder.losses)


class RecordingTrainer(Trainer):
    """Keeps every micro-batch's share of the loss at full precision; Trainer's log rounds."""

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **options)
        self.shares.append(loss)
        return loss


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.ends.append(time.process_time())


def run_trainer(directory: Path, samples: Sequence[dict[str, list[int]]], collator: Any, micro_batch: int) -> Course:
    """Trainer over the same samples; with several micro-batches it too divides by the tokens of the whole mini-batch."""
    clock, parts = Clock(), BATCH // micro_batch
    with tempfile.TemporaryDirectory() as output:
        trainer = RecordingTrainer(
            AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32, attn_implementation="sdpa"),
            TrainingArguments(
                output_dir=output,
                max_steps=STEPS,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=parts,
                train_sampling_strategy="sequential",
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_grad_norm=MAX_NORM,
                optim="adamw_torch_fused",
                use_cpu=True,
                remove_unused_columns=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            data_collator=collator,
            train_dataset=list(samples),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.shares = []
        trainer.train()
    shares = torch.stack(trainer.shares).reshape(STEPS, parts)
    return Course(clock.ends, shares.sum(1).tolist())


def report(samples: Sequence[dict[str, list[int]]], courses: dict[str, list[Course]]) -> None:
    """Medians over rounds; the engine's ratio to each of the others, and how far the curves are apart."""
    tokens = sum(len(sample["input_ids"]) for sample in samples[BATCH:])
    rates = {run: statistics.median(tokens / (each.ends[-1] - each.ends[0]) for each in rounds) for run, rounds in courses.items()}
    (engine, engine_rate), *others = rates.items()
    reference = np.array(courses[engine][0].losses)
    print(f"{engine}: {engine_rate:.0f} real tokens per CPU second, loss {reference[0]:.4f} to {reference[-1]:.4f}")
    for run, rate in others:
        losses = np.array([each.losses for each in courses[run]])
        apart = np.abs(losses / reference - 1).max()
        print(
            f"{run}: {rate:.0f}; the engine makes {engine_rate / rate:.2f} times as many {beside(engine_rate / rate, at_least=BAR)}; "
            f"loss curves differ by at most {apart:.1e}"
        )


def processor() -> str:
    """The processor's name where the system tells, its architecture elsewhere."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    main()
