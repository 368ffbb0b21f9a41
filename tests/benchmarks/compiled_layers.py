"""CPU time of a packed step of fine-tuning with `model.compile = true` against one without, and what the first step costs. One thread.

A Qwen3 of 10 million random weights in float32 learns, by the engine with backend `fsdp` in this process, from 24 samples of 60 to 500 tokens
in micro-batches of at most 4,096 tokens; a step is forward, backward and AdamW. Two batches take turns, so rows have other lengths each time.
That both do the same work is checked first: loss and gradient norm. Rounds are interleaved in one process and the least of each counts. The
first step is in wall seconds, and starts without programs of an earlier run. Run with `nox -s bench`; a few minutes.
"""

import logging
import os
import tempfile
import time
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine
from measuring.words import VOCABULARY, write_words_model

from skyrl_engine import Engine
from skyrl_engine.contracts import SampleColumns

ROUNDS = 3
BUDGET = 4096
AGREEMENT = 1e-5
KINDS = {"without": False, "compiled": True}


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.disable(logging.WARNING)
    numbers = np.random.default_rng(0)
    batches = [draw(numbers) for _ in range(2)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(name) / "programs")
        parameters = write_words_model(Path(name), positions=1024)
        print(f"{machine()}, one thread, torch {torch.__version__}; Qwen3 of {parameters / 1e6:.1f}M parameters, float32")
        engines = {kind: stack.enter_context(open_engine(Path(name), compiles)) for kind, compiles in KINDS.items()}
        found, metrics = {}, {}
        for kind, engine in engines.items():
            started = time.perf_counter()
            metrics[kind] = engine.forward_backward(engine.plan(batches[0]), 0).result().metrics
            found[kind] = metrics[kind]["loss"].value, engine.optim_step().result().grad_norm
            print(f"first step {kind}: {time.perf_counter() - started:.1f} s of wall time")
        print(f"of which it compiled for {metrics['compiled']['compile_seconds'].value:.1f} s")
        for what, one, other in zip(("loss", "gradient norm"), *found.values(), strict=True):
            difference = abs(one - other) / abs(one)
            print(f"{what} {one:.6f}, difference {difference:.1e} {compare_with_bar(difference, at_most=AGREEMENT)}")
        works = {kind: partial(take_steps, engine, batches) for kind, engine in engines.items()}
        least = interleave(works, ROUNDS)
        print(
            f"a later step: {least['compiled'] / least['without']:.3f} of the CPU time without; "
            f"{least['without'] / len(batches):.2f} and {least['compiled'] / len(batches):.2f} s"
        )


def draw(numbers: np.random.Generator) -> SampleColumns:
    samples = [numbers.integers(2, VOCABULARY, length) for length in numbers.integers(60, 500, 24).tolist()]
    return SampleColumns.from_lists(input_ids=samples, num_actions=[len(sample) - 20 for sample in samples])


def open_engine(directory: Path, compiles: bool) -> Engine:
    return Engine.open(
        {
            "model": {"path": str(directory), "compile": compiles},
            "collator": {"use": "packed"},
            "training": {"micro_batch_tokens": BUDGET},
            "optimizer": {"learning_rate": 1e-12},
            "run": {"launch": "inline"},
            "loss": {"use": "cross_entropy"},
        }
    )


def take_steps(engine: Engine, batches: list[SampleColumns]) -> None:
    for columns in batches:
        engine.forward_backward(engine.plan(columns), 0).result()
        engine.optim_step().result()


if __name__ == "__main__":
    main()
