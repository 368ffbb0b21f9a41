"""Score a dataset and write the perplexity of every sample."""

import json
import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from skyrl_engine import Engine
from skyrl_engine.training import ResolvedConfig, RunResult, describe_data, open_session, prepare

Progress = Callable[[str, int, int], None]
FILE = "perplexities.jsonl"


def plan_perplexity(resolved: ResolvedConfig, *, progress: Progress | None = None) -> Mapping[str, str]:
    """Return what a run would score, as lines by their names. Starts nothing."""
    prepared = prepare(resolved, progress)
    samples, size = len(prepared.train.columns), resolved.config.trainer_options.batch_size
    return {
        "model": resolved.config.model.path,
        "data": f"{prepared.train.name}: {samples:,} samples",
        "batches": f"{math.ceil(samples / size):,} of {size}",
    }


def run_perplexity(resolved: ResolvedConfig, *, observers: Sequence[object] = (), progress: Progress | None = None) -> RunResult:
    """Write `perplexities.jsonl` into the run directory, and return the perplexity over all tokens that carry loss."""
    config = resolved.config
    with open_session(resolved, observers=observers, resume=False) as session:
        prepared = prepare(resolved, progress)
        session.record_start(
            prepared.resolved,
            seeds={"run": config.run.seed},
            world={"launch": config.run.launch, "ranks": config.run.ranks, **attrs.asdict(prepared.assembly.description.topology)},
            data={"train": describe_data(prepared.train), "evaluation": None},
        )
        samples, size = len(prepared.train.columns), config.trainer_options.batch_size
        nats, tokens = 0.0, 0
        with (
            Engine.launch(prepared.resolved, prepared.assembly, prepared.files, 0) as engine,
            (session.directory.path / FILE).open("w", encoding="utf-8") as file,
        ):
            for start in range(0, samples, size):
                numbers = np.arange(start, min(start + size, samples))
                plan = engine.plan(prepared.train.batch(numbers))
                logprobs = engine.score(plan, tokens="loss").result().fields["logprobs"]
                for place, number in enumerate(numbers):
                    scores = logprobs[place].astype(np.float64)
                    nats, tokens = nats - float(scores.sum()), tokens + len(scores)
                    perplexity = float(np.exp(-scores.mean())) if len(scores) else None
                    file.write(json.dumps({"sample": int(number), "tokens": len(scores), "perplexity": perplexity}) + "\n")
                if progress is not None:
                    progress("scoring", int(numbers[-1]) + 1, samples)
        return RunResult(session.directory.path, 0, {"perplexity": math.exp(nats / tokens), "tokens": float(tokens)})
