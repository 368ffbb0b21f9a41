"""Real tokens per CPU second of supervised fine-tuning, against Hugging Face Trainer and TRL's SFTTrainer, with one thread.

The same 10M-parameter Qwen3 learns the same chats in the same order, by
- the engine: backend `fsdp`, one rank in this process, as it runs without any option, with the collator `packed`, and with `padded` and a
  mini-batch in one micro-batch;
- a bare torch loop: the model, one chat after the other without padding, and torch's AdamW; nothing can compute less;
- Trainer with padding: `DataCollatorForSeq2Seq` with torch's scaled dot-product attention;
- Trainer with flattening: `DataCollatorWithFlattening` with the same attention. flash-attention, which that collator is made for, does
  not run on CPU; transformers finds the documents by their positions and builds a mask of the whole row instead. It keeps the documents
  apart, which is checked first, and costs the square of the row;
- Trainer with flattening, one chat at a time, accumulating gradients: neither padding nor mask, the fastest Trainer we found on CPU;
- SFTTrainer with padding, with `padding_free` (its flattening, and what its packing turns on; its packing itself would put other chats into
  a mini-batch), and `padding_free` one chat at a time. Its loss never builds the logits, and reports entropy and accuracy, which cannot be
  turned off.

All take AdamW (fused), clip to the same norm and average the loss over the mini-batch's loss-carrying tokens; that they do is checked first:
loss and gradient of the first mini-batch, every parameter. Rounds are interleaved in one process. A run's figure is its CPU time from the end
of its first step to the end of its last, the least of all rounds: loading and warming up do not count; data, optimizer and bookkeeping do.
Run with `nox -s peers`; about five minutes.
"""

import gc
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from attrs import define, frozen
from datasets import Dataset
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine
from measuring.trainer_options import PLAIN
from measuring.words import VOCABULARY, load_model, write_words_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from skyrl_engine import Engine, hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import SampleColumns, StepFinished
from skyrl_engine.proof.comparison import relative_difference
from skyrl_engine.training.sft.trainer import run_sft

ROUNDS, STEPS, BATCH = 3, 4, 8
SHORTEST, LONGEST = 36, 503
BAR = 1.0
"""The engine makes as many tokens as the fastest of them; with `padded`, as the fastest that pads."""
DEFAULTS_BAR, LOOP_BAR = 1.9, 0.98
"""The engine without any option makes so many times the tokens of those that pad, which they do without any option, and of the bare loop."""
AGREEMENT = 1e-5
"""Gradients of the first mini-batch, ||g - g'|| / ||g'|| of the worst parameter: float32 sums in another order stay below."""
LEARNING_RATE, MAX_NORM = 1e-3, 1.0
UNLIMITED = 1e9
IGNORED = -100
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "packed": {"collator": {"use": "packed"}},
    "by default": {},
    "padded": {"collator": {"use": "padded"}, "training": {"micro_batch_tokens": "none"}},
}
LOOP = "bare torch loop"

Sample = dict[str, list[int]]


@frozen
class Course:
    """One training run: CPU time at the end of every step, in seconds, and the loss of every step, in nats per token."""

    ends: Sequence[float]
    losses: Sequence[float]


@frozen
class Gradient:
    """The first mini-batch by one program: its loss in nats per token, and the gradient by parameter, before clipping."""

    loss: float
    by_name: Mapping[str, np.ndarray]


@frozen
class Peer:
    """One way to run another project's trainer; `pads` says that its rows are padded."""

    make: Callable[..., Any]
    micro_batch: int
    pads: bool = False


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # SFTConfig sets options by names that transformers has replaced.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = write_words_model(directory / "model")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
        samples = make_samples(STEPS * BATCH)
        (directory / "train.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        describe(samples, parameters)
        check_flattened_documents(directory / "model", samples)

        peers = peers_of(directory / "model", tokenizer, samples)
        check_first_step(directory, samples, peers)
        runs: dict[str, Callable[[], Course]] = {f"engine, {layout}": partial(run_engine, directory, layout) for layout in LAYOUTS}
        runs[LOOP] = partial(run_loop, directory / "model", samples)
        runs |= {name: partial(course_of, peer) for name, peer in peers.items()}
        courses: dict[str, list[Course]] = {run: [] for run in runs}
        for _ in range(ROUNDS):
            for run, train in runs.items():
                courses[run].append(train())
                gc.collect()
    report(samples, courses, peers)


def peers_of(model: Path, tokenizer: PreTrainedTokenizerFast, samples: Sequence[Sample]) -> dict[str, Peer]:
    """Return the ways to train by name."""
    trainer, sft = partial(make_trainer, model, samples), partial(make_sft_trainer, model, tokenizer, samples)
    padding, flattening = DataCollatorForSeq2Seq(tokenizer), DataCollatorWithFlattening()
    return {
        "Trainer, padding": Peer(partial(trainer, padding), BATCH, pads=True),
        "Trainer, flattening": Peer(partial(trainer, flattening), BATCH),
        "Trainer, flattening, one chat at a time": Peer(partial(trainer, flattening), 1),
        "SFTTrainer, padding": Peer(partial(sft, False), BATCH, pads=True),
        "SFTTrainer, padding_free": Peer(partial(sft, True), BATCH),
        "SFTTrainer, padding_free, one chat at a time": Peer(partial(sft, True), 1),
    }


def make_samples(count: int) -> list[Sample]:
    """Chats as token ids: lognormal lengths, the last 40 to 70% of each the response, which alone carries loss."""
    generator = np.random.default_rng(1)
    samples = []
    for length in np.clip(generator.lognormal(np.log(160), 0.6, count), SHORTEST, LONGEST).astype(int):
        tokens = (generator.zipf(1.3, length) % (VOCABULARY - 2) + 2).tolist()  # uneven, so that there is something to learn
        prompt = int(length * generator.uniform(0.3, 0.6))
        samples.append({"input_ids": tokens, "labels": [IGNORED] * prompt + tokens[prompt:]})
    return samples


def describe(samples: Sequence[Sample], parameters: int) -> None:
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    padded = sum(BATCH * max(batch) for batch in lengths.reshape(STEPS, BATCH).tolist())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}"
    print(f"{machine()}, one thread, {versions}")
    print(
        f"Qwen3 of {parameters / 1e6:.1f}M parameters, float32; {STEPS} steps of {BATCH} chats of {lengths.min()} to {lengths.max()} tokens "
        f"(mean {lengths.mean():.0f}); padding makes {padded / lengths.sum():.2f} times as many; {ROUNDS} rounds"
    )


@torch.no_grad()
def check_flattened_documents(model_directory: Path, samples: Sequence[Sample]) -> None:
    """Say whether the second of two flattened documents changes with the first, without a cache as in training."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    first, second = samples[0], samples[1]
    other = {"input_ids": first["input_ids"][::-1], "labels": first["labels"]}
    flatten = DataCollatorWithFlattening()
    behind = slice(len(first["input_ids"]), None)
    logits = [model(**flatten([document, second]), use_cache=False).logits[0, behind] for document in (first, other)]
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


def check_first_step(directory: Path, samples: Sequence[Sample], peers: Mapping[str, Peer]) -> None:
    """Say how far loss and gradient of the first mini-batch are from the engine's, by `packed`."""
    first = samples[:BATCH]
    ours = {layout: first_of_engine(directory, layout, first) for layout in LAYOUTS}
    theirs = {name: first_of_peer(peer) for name, peer in peers.items()}
    (_, expected), *others = ({f"engine, {layout}": gradient for layout, gradient in ours.items()} | theirs).items()
    for name, gradient in others:
        assert gradient.by_name.keys() == expected.by_name.keys(), sorted(gradient.by_name.keys() ^ expected.by_name.keys())
        apart = max(relative_difference(gradient.by_name[parameter], right) for parameter, right in expected.by_name.items())
        print(
            f"first mini-batch, {name} beside engine, packed: losses differ by {abs(gradient.loss / expected.loss - 1):.1e}, "
            f"gradients by {apart:.1e} at the worst parameter {compare_with_bar(apart, at_most=AGREEMENT)}"
        )


def first_of_engine(directory: Path, layout: str, first: Sequence[Sample]) -> Gradient:
    columns = SampleColumns.from_lists(
        input_ids=[sample["input_ids"] for sample in first],
        num_actions=[sum(label != IGNORED for label in sample["labels"]) for sample in first],
    )
    table = {"model": {"path": str(directory / "model")}, "run": {"device": "cpu"}, **LAYOUTS[layout]}
    with Engine.open(table) as engine:
        result = engine.forward_backward(engine.plan(columns)).result()
        return Gradient(result.output.metrics["loss"].result, engine.gradients())


def first_of_peer(peer: Peer) -> Gradient:
    with tempfile.TemporaryDirectory() as output:
        trainer = peer.make(arguments(output, peer.micro_batch, steps=1, max_norm=UNLIMITED))
        keeper = GradientKeeper()
        trainer.add_callback(keeper)
        trainer.train()
        return Gradient(torch.stack(trainer.shares).sum().item(), keeper.kept)


def run_loop(model_directory: Path, samples: Sequence[Sample]) -> Course:
    """Train one chat after the other, without padding, by torch alone."""
    model = load_model(model_directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    ends, losses = [], []
    for start in range(0, STEPS * BATCH, BATCH):
        batch = samples[start : start + BATCH]
        count = sum(label != IGNORED for sample in batch for label in sample["labels"])
        total = 0.0
        for sample in batch:
            ids, labels = (torch.tensor([sample[name]]) for name in ("input_ids", "labels"))
            first = int((labels[0] != IGNORED).nonzero()[0])
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first + 1).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[0, first:], reduction="sum") / count
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.process_time())
        losses.append(total)
    return Course(ends, losses)


def run_engine(directory: Path, layout: str) -> Course:
    with tempfile.TemporaryDirectory() as run:
        table: dict[str, Any] = {
            "model": {"path": str(directory / "model")},
            "data": {"train": str(directory / "train.jsonl"), "cache": str(directory / "cache")},
            "run": {"directory": f"{run}/run", "device": "cpu"},
            "training": {"steps": STEPS, "batch_size": BATCH, "shuffle": False},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
        }
        for name, keys in LAYOUTS[layout].items():
            table[name] = {**table.get(name, {}), **keys}
        recorder = Recorder([], [])
        run_sft(resolve(from_dict(table, "benchmark")), observers=[recorder])
    return Course(recorder.ends, recorder.losses)


class Recording:
    """Keeps every micro-batch's share of the loss at full precision, which logs round."""

    shares: list[Tensor]

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **options)  # type: ignore[misc] # of a Trainer, the other base
        self.shares.append(loss)
        return loss


class RecordingTrainer(Recording, Trainer):
    pass


class RecordingSftTrainer(Recording, SFTTrainer):
    pass


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.ends.append(time.process_time())


class GradientKeeper(TrainerCallback):
    """Keeps the gradient that the first optimizer step is given."""

    def __init__(self) -> None:
        self.kept: dict[str, np.ndarray] = {}

    def on_pre_optimizer_step(self, *arguments: Any, model: Any, **options: Any) -> None:
        self.kept = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}


def arguments(output: str, micro_batch: int, *, steps: int = STEPS, max_norm: float = MAX_NORM) -> dict[str, Any]:
    """Options of TrainingArguments. With several micro-batches Trainer too divides by the tokens of the whole mini-batch."""
    return {
        **PLAIN,
        "output_dir": output,
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": BATCH // micro_batch,
        "train_sampling_strategy": "sequential",
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": max_norm,
        "remove_unused_columns": False,
        "logging_strategy": "no",
    }


def make_trainer(model: Path, samples: Sequence[Sample], collator: Any, options: Mapping[str, Any]) -> Any:
    trainer = RecordingTrainer(load_model(model), TrainingArguments(**options), data_collator=collator, train_dataset=list(samples))
    return prepare_trainer(trainer)


def make_sft_trainer(
    model: Path, tokenizer: PreTrainedTokenizerFast, samples: Sequence[Sample], padding_free: bool, options: Mapping[str, Any]
) -> Any:
    """Makes an SFTTrainer that cuts no chat."""
    whole = {"max_length": None, "padding_free": padding_free}
    trainer = RecordingSftTrainer(
        load_model(model), SFTConfig(**options, **whole), train_dataset=Dataset.from_list(list(samples)), processing_class=tokenizer
    )
    return prepare_trainer(trainer)


def prepare_trainer(trainer: Any) -> Any:
    trainer.remove_callback(PrinterCallback)
    trainer.shares = []
    return trainer


def course_of(peer: Peer) -> Course:
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        trainer = peer.make(arguments(output, peer.micro_batch))
        trainer.add_callback(clock)
        trainer.train()
    return Course(clock.ends, torch.stack(trainer.shares).reshape(STEPS, -1).sum(1).tolist())


def report(samples: Sequence[Sample], courses: Mapping[str, Sequence[Course]], peers: Mapping[str, Peer]) -> None:
    """Print the rate of every run, the engine's ratio to each of the others, and how far the curves are apart."""
    tokens = sum(len(sample["input_ids"]) for sample in samples[BATCH:])
    rates = {run: max(tokens / (course.ends[-1] - course.ends[0]) for course in rounds) for run, rounds in courses.items()}
    packed, default, padded = (f"engine, {layout}" for layout in LAYOUTS)
    reference = np.array(courses[packed][0].losses)
    for run in (packed, default, padded):
        print(f"{run}: {rates[run]:.0f} real tokens per CPU second, loss {reference[0]:.4f} to {reference[-1]:.4f}")
    ratio = rates[default] / rates[LOOP]
    print(f"{LOOP}: {rates[LOOP]:.0f}; {default} makes {ratio:.2f} times as many {compare_with_bar(ratio, at_least=LOOP_BAR)}")
    for run, peer in peers.items():
        apart = np.abs(np.array([course.losses for course in courses[run]]) / reference - 1).max()
        bars = {packed: BAR, default: DEFAULTS_BAR if peer.pads else BAR, **({padded: BAR} if peer.pads else {})}
        ratios = [
            f"{ours} makes {rates[ours] / rates[run]:.2f} times as many {compare_with_bar(rates[ours] / rates[run], at_least=bar)}"
            for ours, bar in bars.items()
        ]
        print(f"{run}: {rates[run]:.0f}; {'; '.join(ratios)}; loss curves differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
