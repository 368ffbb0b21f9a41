"""Real tokens per CPU second with `padded` where samples of like length share a micro-batch, against the given order, with one thread.

A Qwen3 of 10M parameters learns chats of 16 to 256 tokens, uniform, 64 per step, in micro-batches of 4 rows. The two runs differ in
`collator.group_by_length` alone, so both make the same step: their losses are compared first. Rounds are interleaved in one process. A figure
is the CPU time from the end of the first step to the end of the last, the least of all rounds. Run with `nox -s bench`.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from attrs import define, field
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from skyrl_engine import hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import Layout, SampleColumns, StepFinished
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine_collators.padded.collator import PaddedCollator

ROUNDS, STEPS, BATCH, ROWS = 2, 2, 64, 4
SHORTEST, LONGEST = 16, 256
VOCABULARY = 8192
BAR = 1.35
AGREEMENT = 1e-5


@define(eq=False)
class Recorder:
    """An observer that keeps the loss and the CPU time at the end of every step."""

    ends: list[float] = field(factory=list)
    losses: list[float] = field(factory=list)

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.ends.append(time.process_time())
        self.losses.append(event.metrics["loss"])


def main() -> None:
    torch.set_num_threads(1)
    samples = make_samples()
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    print(f"{machine()}, one thread, torch {torch.__version__}; steps of {BATCH} chats of {SHORTEST} to {LONGEST} tokens")
    for grouped in (True, False):
        print(f"group_by_length {grouped}: {padding(samples[:BATCH], grouped):.1%} of a step's tokens are padding")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8}
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
        tokenizer.save_pretrained(directory / "model")
        write_model(
            directory / "model",
            tokenizer=tokenizer,
            vocab_size=VOCABULARY,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=512,
            **sizes,
        )
        (directory / "train.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        least: dict[bool, float] = {}
        for _ in range(ROUNDS):
            courses = {grouped: run(directory, grouped) for grouped in (True, False)}
            apart = max(abs(one / other - 1) for one, other in zip(courses[True].losses, courses[False].losses, strict=True))
            assert apart < AGREEMENT, f"the runs make other steps: losses are apart by {apart:.1e}"
            for grouped, course in courses.items():
                seconds = course.ends[-1] - course.ends[0]
                least[grouped] = min(least.get(grouped, seconds), seconds)
    tokens = int(lengths[BATCH:].sum())
    ratio = least[False] / least[True]
    print(
        f"{tokens / least[True]:.0f} real tokens per CPU second with group_by_length, {tokens / least[False]:.0f} without, "
        f"{ratio:.2f} times as many {compare_with_bar(ratio, at_least=BAR)}"
    )


def make_samples() -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(0)
    rows = [
        generator.integers(2, VOCABULARY, length).tolist() for length in generator.integers(SHORTEST, LONGEST + 1, STEPS * BATCH)
    ]
    return [{"input_ids": row, "labels": row} for row in rows]


def padding(samples: list[dict[str, list[int]]], grouped: bool) -> float:
    columns = SampleColumns.from_lists(input_ids=[sample["input_ids"] for sample in samples])
    plan = PaddedCollator(group_by_length=grouped).plan(columns.lengths, Layout(micro_batch_rows=ROWS))
    return 1 - len(columns.input_ids) / plan.dense_tokens


def run(directory: Path, grouped: bool) -> Recorder:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as output:
        table = {
            "model": {"path": str(directory / "model")},
            "data": {"train": str(directory / "train.jsonl"), "cache": str(directory / "cache")},
            "run": {"directory": f"{output}/run", "device": "cpu"},
            "collator": {"use": "padded", "group_by_length": grouped},
            "training": {"steps": STEPS, "batch_size": BATCH, "micro_batch_rows": ROWS, "shuffle": False},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
        }
        run_sft(resolve(from_dict(table, "benchmark")), observers=[recorder])
    return recorder


if __name__ == "__main__":
    main()
