"""Record what a few runs compute, to the last bit: `python tests/golden.py OUT [--only NAME ...]`.

A refactoring must not change a number. Run this program at the commit before and at the one after, on one machine, with the same versions of
everything else, and compare the two files: equal files mean equal losses, gradient norms and weights. Nothing that it records is committed,
because other processors round differently.

It goes through the command line alone, so one copy of it can be run against two checkouts: it uses the `skyrl-engine` of the interpreter
that runs it.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 96
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUT", help="The JSON file to write.")
    parser.add_argument("--only", action="append", choices=RUNS, help="Record this run; may be repeated. Without it: all.")
    arguments = parser.parse_args()
    recorded = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        for run in arguments.only or RUNS:
            directory = Path(name) / run
            directory.mkdir()
            recorded[run] = record(RUNS[run](directory))
            print(f"{run}: {len(recorded[run]['steps'])} steps, last loss {recorded[run]['steps'][-1]['loss']}", flush=True)
    arguments.output.write_text(json.dumps(recorded, indent=1) + "\n")


def demo(directory: Path) -> Path:
    """The first 60 steps of `skyrl-engine demo`, with its evaluations."""
    engine("demo", "--steps", "60", "--output", str(directory / "demo"))
    return directory / "demo" / "run"


def padded_inline(directory: Path) -> Path:
    """Fsdp on one rank in this process, micro-batches of two padded rows."""
    return trained(directory, {"collator": {"use": "padded"}, "training": {"micro_batch_rows": 2}})


def packed_two_ranks(directory: Path) -> Path:
    """Fsdp on two ranks, packed rows."""
    return trained(directory, {"collator": {"use": "packed"}, "training": {"micro_batch_tokens": 48}, "run": RAY})


def megatron_tensor_parallel(directory: Path) -> Path:
    """Megatron on two tensor-parallel ranks."""
    backend = {"use": "megatron", "tensor_parallel": 2}
    return trained(directory, {"backend": backend, "training": {"micro_batch_rows": 4}, "run": RAY})


RAY = {"launch": "ray", "ranks": 2}
RUNS: Mapping[str, Callable[[Path], Path]] = {
    run.__name__: run for run in (demo, padded_inline, packed_two_ranks, megatron_tensor_parallel)
}


def trained(directory: Path, settings: Mapping[str, Mapping[str, Any]]) -> Path:
    """Train a small model made here; returns the run directory."""
    write_model(directory / "model")
    for split, samples in (("train", 24), ("eval", 6)):
        write_samples(directory / f"{split}.jsonl", samples)
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": "./model"},
        "data": {"train": "./train.jsonl", "eval": "./eval.jsonl"},
        "run": {"directory": "./run", "seed": 3, "device": "cpu"},
        "training": {"steps": STEPS, "batch_size": 8},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1, "schedule": "linear", "weight_decay": 0.1},
    }
    for table, values in settings.items():
        tables.setdefault(table, {}).update(values)
    lines = [
        line
        for table, values in tables.items()
        for line in (f"[{table}]", *(f"{key} = {json.dumps(each)}" for key, each in values.items()))
    ]
    (directory / "run.toml").write_text("\n".join(lines) + "\n")
    engine("run", str(directory / "run.toml"))
    return directory / "run"


def engine(*arguments: str) -> None:
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "skyrl_engine", "--quiet", *arguments], check=True, stdout=sys.stderr, env={**os.environ, **settings}
    )


def write_model(directory: Path) -> None:
    """A two-layer Qwen3 with random weights and a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(directory)


def write_samples(path: Path, samples: int) -> None:
    """Prompts and completions of uneven lengths."""
    draws = random.Random(path.name)

    def words(count: int) -> str:
        return " ".join(f"w{draws.randrange(2, VOCABULARY)}" for _ in range(count))

    rows = ({"prompt": words(draws.randrange(1, 9)), "completion": " " + words(draws.randrange(1, 13))} for _ in range(samples))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(run: Path) -> dict[str, Any]:
    """Losses and gradient norms of every step, evaluations, and a SHA-256 of every exported weight."""
    from safetensors.numpy import load_file

    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: event["metrics"][name] for name in ("loss", "grad_norm")} for event in events if event["kind"] == "step"]
    evaluations = [event["metrics"]["loss"] for event in events if event["kind"] == "evaluation"]
    weights = {
        name: hashlib.sha256(tensor.tobytes()).hexdigest()
        for file in sorted((run / "model").glob("*.safetensors"))
        for name, tensor in sorted(load_file(file).items())
    }
    assert steps
    assert weights
    return {"steps": steps, "evaluations": evaluations, "weights": weights}


if __name__ == "__main__":
    main()
