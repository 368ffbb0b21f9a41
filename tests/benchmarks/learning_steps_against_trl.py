"""CPU time of a step of KTO, of a reward model and of distillation from a teacher, against TRL's trainers; and memory of a step of DPO at a
vocabulary of 152,064. One thread.

The same Qwen3 of 10 million random weights in float32 learns the same rows in every step, in the same order, by the engine as it is by
default, and with padded rows in one micro-batch; and by TRL's trainer with all rows in one micro-batch, and half or a quarter of them at a
time, of which the fastest counts. Neither recomputes activations; both take AdamW (fused) and clip to the same norm; references are scored
before the first step. A run's figure is its CPU time from the end of its first step to the end of its last, the least of all rounds, which are
interleaved in one process.

That both do the same work is checked by the losses of all steps. TRL's KTO takes its mismatched answers in chunks of a batch and the engine
over the whole of it, so that its losses may differ in the third digit.

Memory is counted in allocations of a forward and backward pass over the same pairs, less the gradients, so that no machine is smaller; TRL's
passes are those of its own `compute_loss`. Run with `nox -s peers`; about six minutes.
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
from measuring.allocations import highest
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine
from measuring.trainer_options import PLAIN
from measuring.words import VOCABULARY, load_model, write_words_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from skyrl_engine import Engine, hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import SampleColumns, StepFinished
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.training.preference.trainer import run_preference
from skyrl_engine.training.reward_model.trainer import run_reward_model
from skyrl_engine.training.sft.trainer import run_sft

ROUNDS, STEPS, ROWS = 2, 3, 8
BAR, BAR_OF_MEMORY = 0.8, 0.6
LEARNING_RATE, MAX_NORM, BETA = 1e-4, 1.0, 0.1
WIDE, WIDE_PAIRS, WIDE_PROMPT, WIDE_ANSWER = 152_064, 4, 64, 64
DEFAULT = "engine, by default"
Rows = list[dict[str, Any]]


@frozen
class Course:
    """CPU time at the end of every step, in seconds, and its loss."""

    ends: Sequence[float]
    losses: Sequence[float]


@frozen
class Kind:
    """A kind of training: the engine's run and tables, TRL's trainer and arguments, and how far losses may be apart."""

    name: str
    rows: Rows
    run: Callable[..., Any]
    tables: Mapping[str, Any]
    trainer: Any
    config: Any
    options: Mapping[str, Any]
    apart: float
    per_row: int = 1


def make_kinds(directory: Path) -> list[Kind]:
    draw = np.random.default_rng(1)

    def write_text(low: int = 12, high: int = 120) -> str:
        length = int(np.clip(draw.lognormal(np.log(40), 0.6), low, high))
        return " ".join(f"w{word}" for word in draw.integers(2, VOCABULARY, length))

    judged = [{"prompt": write_text(), "completion": f" {write_text()}", "label": bool(n % 2)} for n in range(STEPS * ROWS)]
    pairs = [
        {"prompt": write_text(), "chosen": f" {write_text()}", "rejected": f" {write_text()}"} for _ in range(STEPS * ROWS // 2)
    ]
    chats = [
        {"messages": [{"role": "user", "content": write_text()}, {"role": "assistant", "content": write_text()}]}
        for _ in range(STEPS * ROWS)
    ]
    texts = {"template": "none"}
    preference = {"trainer": "preference", "reference": {"precompute": True}, "loss": {"use": "kto", "beta": BETA}, "data": texts}
    taught = {
        "trainer": "sft",
        "teacher": {"path": str(directory / "teacher")},
        "loss": {"use": "divergence", "divergence": "jensen_shannon", "beta": 0.5},
        "reducer": {"use": "token_mean"},
        "data": {"loss_on": "completion"},
    }
    return [
        Kind(
            "KTO", judged, run_preference, preference, KTOTrainer, KTOConfig, {"beta": BETA, "precompute_ref_log_probs": True}, 2e-2
        ),
        Kind(
            "reward model",
            pairs,
            run_reward_model,
            {"trainer": "reward_model", "model": {"path": str(directory / "judge")}, "data": texts},
            RewardTrainer,
            RewardConfig,
            {},
            1e-3,
            2,
        ),
        Kind(
            "distillation",
            chats,
            run_sft,
            taught,
            GKDTrainer,
            GKDConfig,
            {"beta": 0.5, "lmbda": 0.0, "temperature": 1.0},
            1e-2,
        ),
    ]


def write_teacher(directory: Path) -> None:
    """Write the student with noise on its weights, and its tokenizer."""
    teacher = load_model(directory / "model")
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    teacher.save_pretrained(directory / "teacher")
    PreTrainedTokenizerFast.from_pretrained(directory / "model").save_pretrained(directory / "teacher")


def write_judge(directory: Path) -> None:
    """Write the student with a head that values texts differently, and its tokenizer: a head of zeros would give every step the loss log 2."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
    torch.manual_seed(3)
    judge = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1, dtype=torch.float32)
    judge.config.pad_token_id = tokenizer.pad_token_id
    torch.nn.init.normal_(judge.score.weight, std=0.2)
    judge.save_pretrained(directory / "judge")
    tokenizer.save_pretrained(directory / "judge")


@define(eq=False)
class Recorder:
    """An observer of the engine's run."""

    ends: list[float]
    losses: list[float]

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.losses.append(event.metrics["loss"])
        self.ends.append(time.process_time())


def run_engine(directory: Path, kind: Kind, tables: Mapping[str, Any], **training: Any) -> Course:
    with tempfile.TemporaryDirectory() as run:
        table = {
            "model": {"path": str(directory / "model")},
            "run": {"directory": f"{run}/run", "device": "cpu"},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
            **kind.tables,
            **tables,
            "data": {"train": str(directory / f"{kind.name}.jsonl"), "cache": f"{run}/cache", **kind.tables["data"]},
            "training": {"steps": STEPS, "batch_size": ROWS, "shuffle": False, **training},
        }
        recorder = Recorder([], [])
        kind.run(resolve(from_dict(table, "benchmark")), observers=[recorder])
    return Course(recorder.ends, recorder.losses)


class Clock(TrainerCallback):
    """Keeps the end of every step, and its loss."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.ends.append(time.process_time())

    def on_log(self, *arguments: Any, logs: Mapping[str, float], **options: Any) -> None:
        if "grad_norm" in logs:
            self.losses.append(logs["loss"])


def run_trl(directory: Path, kind: Kind, part: int) -> Course:
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = kind.config(
            output_dir=output,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS // kind.per_row // part,
            gradient_accumulation_steps=part,
            train_sampling_strategy="sequential",
            max_length=None if kind.config is not GKDConfig else 1024,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_NORM,
            logging_steps=1,
            **PLAIN,
            **kind.options,
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
        model = load_model(directory / "model")
        if kind.trainer is RewardTrainer:
            model = AutoModelForSequenceClassification.from_pretrained(directory / "judge", dtype=torch.float32)
        others = {"teacher_model": load_model(directory / "teacher")} if kind.trainer is GKDTrainer else {}
        data = datasets.Dataset.from_list(kind.rows)
        trainer = kind.trainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, **others)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    return Course(clock.ends, clock.losses)


def compare(directory: Path, kind: Kind) -> None:
    (directory / f"{kind.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kind.rows))
    padded = {"collator": {"use": "padded"}}
    runs: dict[str, Callable[[], Course]] = {
        DEFAULT: partial(run_engine, directory, kind, {}),
        "engine, padded": partial(run_engine, directory, kind, padded, micro_batch_rows=ROWS),
        **{f"TRL, 1/{part} of the rows at once": partial(run_trl, directory, kind, part) for part in (1, 2, 4)},
    }
    courses: dict[str, list[Course]] = {run: [] for run in runs}
    for _ in range(ROUNDS):
        for run, train in runs.items():
            courses[run].append(train())
            gc.collect()
    seconds = {run: min((one.ends[-1] - one.ends[0]) / (STEPS - 1) for one in rounds) for run, rounds in courses.items()}
    expected = np.array(courses[DEFAULT][0].losses)
    print(f"{kind.name}:")
    for run, rounds in courses.items():
        apart = float(np.abs(np.array(rounds[0].losses) / expected - 1).max())
        print(
            f"  {run}: {seconds[run]:.3f} CPU s a step; losses apart by {apart:.1e} {compare_with_bar(apart, at_most=kind.apart)}"
        )
    fastest = min((run for run in seconds if run.startswith("TRL")), key=lambda run: seconds[run])
    share = seconds[DEFAULT] / seconds[fastest]
    print(f"  by default {share:.3f} of the CPU time of {fastest} {compare_with_bar(share, at_most=BAR)}", flush=True)


# ---------------------------------------------------------------- memory


def compare_memory(directory: Path) -> None:
    folder = directory / "wide"
    tokenizer = write_tokenizer(folder, ["one two three"])
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": WIDE}
    with quiet_progress():
        write_model(folder, **sizes, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, WIDE, WIDE_PROMPT + WIDE_ANSWER).tolist() for _ in range(2 * WIDE_PAIRS)]
    for pair in range(WIDE_PAIRS):
        texts[2 * pair + 1][:WIDE_PROMPT] = texts[2 * pair][:WIDE_PROMPT]
    ours, theirs = peak_of_engine(folder, texts), peak_of_trl(folder, texts)
    share = ours / theirs
    bar = compare_with_bar(share, at_most=BAR_OF_MEMORY)
    print(f"memory of DPO, vocabulary {WIDE:,}: {ours / 2**20:.0f} MiB, TRL {theirs / 2**20:.0f} MiB: {share:.2f} {bar}")


def peak_of_engine(folder: Path, texts: Sequence[list[int]]) -> int:
    samples = np.arange(len(texts))
    columns = SampleColumns.create(
        input_ids=np.concatenate(texts),
        token_offsets=np.arange(len(texts) + 1) * (WIDE_PROMPT + WIDE_ANSWER),
        action_offsets=np.arange(len(texts) + 1) * WIDE_ANSWER,
        columns={"ref_logprobs": np.full(len(texts) * WIDE_ANSWER, -12.0, dtype=np.float32)},
        sample_values={"role": samples % 2},
        unit_ids=samples // 2,
    )
    tables = {
        "model": {"path": str(folder)},
        "collator": {"use": "padded"},
        "loss": {"use": "dpo", "beta": BETA},
        "reducer": {"use": "sequence_mean"},
        "run": {"device": "cpu"},
        "optimizer": {"schedule": "constant"},
    }
    with Engine.open(tables) as engine:
        plan = engine.plan(columns, micro_batch_rows=len(texts))
        engine.train(plan, per_token_outputs=False)
        peak = highest(lambda: engine.forward_backward(plan, per_token_outputs=False).result(), folder / "trace.json")
        return peak - sum(gradient.nbytes for gradient in engine.gradients().values())


def peak_of_trl(folder: Path, texts: Sequence[list[int]]) -> int:
    """A pass of DPOTrainer over the same tokens, reference log-probabilities known, as with `precompute_ref_log_probs`."""
    rows = [{"prompt": "one", "chosen": " two", "rejected": " three"} for _ in range(WIDE_PAIRS)]
    with tempfile.TemporaryDirectory() as output:
        arguments = DPOConfig(output, per_device_train_batch_size=WIDE_PAIRS, beta=BETA, precompute_ref_log_probs=True, **PLAIN)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        trainer = DPOTrainer(model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
    # chosen halves come first
    ids = torch.tensor([*texts[0::2], *texts[1::2]])
    completion = torch.zeros_like(ids)
    completion[:, WIDE_PROMPT:] = 1
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": completion,
        "ref_chosen_logps": torch.full((WIDE_PAIRS,), -12.0 * WIDE_ANSWER),
        "ref_rejected_logps": torch.full((WIDE_PAIRS,), -12.0 * WIDE_ANSWER),
    }
    trainer.model.train()

    def learn() -> None:
        trainer.compute_loss(trainer.model, dict(batch)).backward()

    learn()
    trainer.model.zero_grad()
    peak = highest(learn, folder / "trace_trl.json")
    return peak - sum(parameter.grad.nbytes for parameter in trainer.model.parameters() if parameter.grad is not None)


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = write_words_model(directory / "model", positions=1024)
        write_teacher(directory)
        write_judge(directory)
        print(f"{machine()}, one thread, torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")
        print(f"Qwen3 of {parameters / 1e6:.1f}M parameters, float32; {STEPS} steps of {ROWS} samples; {ROUNDS} rounds")
        compare_memory(directory)
        for kind in make_kinds(directory):
            compare(directory, kind)


if __name__ == "__main__":
    main()
