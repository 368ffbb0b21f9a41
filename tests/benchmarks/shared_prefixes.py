"""CPU time of steps whose samples share prefixes: rows of trees (`collator = "tree"`) against packed rows. One thread.

A Qwen3 of 10 million random weights in float32 learns, by the engine with backend `fsdp` in this process,
- from groups: 16 prompts of 512 tokens with 8 answers of 64; a step is a pass that scores the old policy, forward, backward and AdamW;
- from pairs, by DPO: 16 prompts of 512 tokens with 2 answers of 64; a step is forward, backward and AdamW;
- from 128 samples of 60 to 500 tokens of which no two begin alike: what looking for prefixes costs where there are none.

Both layouts get the same samples, and micro-batches of at most 4,608 tokens, a packed group. That both do the same work is checked first:
loss and gradient norm. Then the time of looking for prefixes and of planning, for 8,192 samples in 1,024 groups. Rounds are interleaved in
one process and the least of each counts. Run with `nox -s bench`; about fifteen minutes.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine
from measuring.words import VOCABULARY, write_words_model

from skyrl_engine import Engine
from skyrl_engine.contracts import Layout, SampleColumns, find_common_prefixes, measure_lengths
from skyrl_engine_collators.tree.collator import TreeCollator

ROUNDS = 2
PROMPT, ANSWER = 512, 64
GROUPS, GROUP_SIZE = 16, 8
BUDGET = GROUP_SIZE * (PROMPT + ANSWER)
"""Tokens of a micro-batch."""

GRPO_BAR, DPO_BAR, UNSHARED_BAR = 0.30, 0.62, 1.02
"""Shares of the CPU time of a packed step."""

PLANNING_BAR, PREFIX_BAR = 20.0, 5.0
"""Milliseconds to plan 8,192 samples in 1,024 trees, and nanoseconds a token to find the prefixes."""

AGREEMENT = 1e-5
LAYOUTS = ("packed", "tree")


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.disable(logging.WARNING)
    numbers = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = write_words_model(directory, positions=1024)
        print(f"{machine()}, one thread, torch {torch.__version__}; Qwen3 of {parameters / 1e6:.1f}M parameters, float32")
        compare("GRPO step", GRPO_BAR, directory, {"loss": {"use": "ppo"}}, make_groups(numbers), score=True)
        compare("DPO step", DPO_BAR, directory, {"loss": {"use": "dpo"}, "reducer": {"use": "sequence_mean"}}, make_pairs(numbers))
        compare("nothing shared", UNSHARED_BAR, directory, {"loss": {"use": "cross_entropy"}}, make_unshared(numbers))
    measure_planning(numbers)


def make_groups(numbers: np.random.Generator) -> SampleColumns:
    samples = draw_samples(numbers, GROUPS, GROUP_SIZE)
    advantages = np.repeat(numbers.normal(size=len(samples)), ANSWER).astype(np.float32)
    old = np.full(len(advantages), -9.0, dtype=np.float32)
    groups = np.arange(len(samples)) // GROUP_SIZE
    return to_columns(samples, columns={"advantages": advantages, "old_logprobs": old}, group_ids=groups)


def make_pairs(numbers: np.random.Generator) -> SampleColumns:
    samples = draw_samples(numbers, GROUPS, 2)
    place = np.arange(len(samples))
    reference = np.full(len(samples) * ANSWER, -9.0, dtype=np.float32)
    units = place // 2
    return to_columns(
        samples, columns={"ref_logprobs": reference}, unit_ids=units, group_ids=units, sample_values={"role": place % 2}
    )


def make_unshared(numbers: np.random.Generator) -> SampleColumns:
    lengths = numbers.integers(60, 500, 128)
    samples = [numbers.integers(2, VOCABULARY, length) for length in lengths.tolist()]
    return SampleColumns.from_lists(input_ids=samples, num_actions=[len(sample) - 20 for sample in samples])


def draw_samples(numbers: np.random.Generator, prompts: int, answers: int) -> list[np.ndarray]:
    drawn = [numbers.integers(2, VOCABULARY, PROMPT) for _ in range(prompts)]
    return [np.concatenate([prompt, numbers.integers(2, VOCABULARY, ANSWER)]) for prompt in drawn for _ in range(answers)]


def to_columns(samples: Sequence[np.ndarray], **others: Any) -> SampleColumns:
    offsets = np.arange(len(samples) + 1, dtype=np.int64)
    return SampleColumns.create(
        input_ids=np.concatenate(samples),
        token_offsets=offsets * (PROMPT + ANSWER),
        action_offsets=offsets * ANSWER,
        **others,
    )


def compare(
    name: str, bar: float, directory: Path, tables: Mapping[str, Any], columns: SampleColumns, *, score: bool = False
) -> None:
    """Print the share of a packed step's CPU time that a step on rows of trees takes."""
    with ExitStack() as stack:
        engines = {layout: stack.enter_context(open_engine(directory, layout, tables)) for layout in LAYOUTS}
        check_same_work(name, engines, columns)
        works: dict[str, Callable[[], object]] = {
            layout: partial(take_step, engine, columns, score) for layout, engine in engines.items()
        }
        least = interleave(works, ROUNDS)
        computed = {layout: engine.plan(columns).cut.dense_tokens for layout, engine in engines.items()}
    ratio = least["tree"] / least["packed"]
    print(
        f"{name}: {ratio:.3f} of packed {compare_with_bar(ratio, at_most=bar)}; {least['packed']:.2f} and {least['tree']:.2f} s, "
        f"{computed['packed']} and {computed['tree']} tokens"
    )


def open_engine(directory: Path, layout: str, tables: Mapping[str, Any]) -> Engine:
    return Engine.open(
        {
            "model": {"path": str(directory)},
            "collator": {"use": layout},
            "training": {"micro_batch_tokens": BUDGET},
            "optimizer": {"learning_rate": 1e-12},
            "run": {"launch": "inline"},
            **tables,
        }
    )


def check_same_work(name: str, engines: Mapping[str, Engine], columns: SampleColumns) -> None:
    found = {}
    for layout, engine in engines.items():
        loss = engine.forward_backward(engine.plan(columns), 0).result().metrics["loss"].value
        found[layout] = loss, engine.optim_step().result().grad_norm
    for what, one, other in zip(("loss", "gradient norm"), found["packed"], found["tree"], strict=True):
        difference = abs(one - other) / max(abs(one), 1e-3)
        print(f"{name}: {what} {one:.6f}, difference {difference:.1e} {compare_with_bar(difference, at_most=AGREEMENT)}")


def take_step(engine: Engine, columns: SampleColumns, score: bool) -> None:
    plan = engine.plan(columns)
    if score:
        plan = plan.with_columns({"old_logprobs": engine.score(plan).result().fields["logprobs"]})
    for mini_batch in range(len(plan)):
        engine.forward_backward(plan, mini_batch)
    engine.optim_step().result()


def measure_planning(numbers: np.random.Generator) -> None:
    columns = to_columns(draw_samples(numbers, 1024, 8), group_ids=np.arange(8192) // 8)
    columns = SampleColumns.create(
        input_ids=columns.input_ids.astype(np.int32),
        token_offsets=columns.token_offsets,
        action_offsets=columns.action_offsets,
        group_ids=columns.group_ids,
    )
    collator = TreeCollator()
    lengths = measure_lengths(collator, columns)
    works: dict[str, Callable[[], object]] = {
        "prefixes": partial(find_common_prefixes, columns.input_ids, columns.token_offsets),
        "whole trees": partial(collator.plan, lengths, Layout(dp=8, micro_batch_tokens=8192)),
        "trees that are cut": partial(collator.plan, lengths, Layout(dp=8, micro_batch_tokens=1024)),
    }
    least = interleave(works, 5)
    per_token = least["prefixes"] / len(columns.input_ids) * 1e9
    print(f"finding prefixes: {per_token:.1f} ns a token {compare_with_bar(per_token, at_most=PREFIX_BAR)}")
    for work in ("whole trees", "trees that are cut"):
        spent = least[work] * 1e3
        print(f"planning 8,192 samples in 1,024 trees, {work}: {spent:.1f} ms {compare_with_bar(spent, at_most=PLANNING_BAR)}")


if __name__ == "__main__":
    main()
