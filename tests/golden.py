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
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 96
STEPS = 4
RECORDED = ("loss", "grad_norm", "reward/mean", "rollout/tokens", "policy/gap_max", "rewards/margins")
"""Metrics of a step that are written down, where a run has them."""


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
            assert all(math.isfinite(value) for step in recorded[run]["steps"] for value in step.values()), run
            print(f"{run}: {len(recorded[run]['steps'])} steps, last loss {recorded[run]['steps'][-1]['loss']}", flush=True)
    arguments.output.write_text(json.dumps(recorded, indent=1) + "\n")


def demo(directory: Path) -> Path:
    """The first 60 steps of `skyrl-engine demo`, with its evaluations."""
    ended = engine("demo", "--steps", "60", "--output", str(directory / "demo"))
    assert ended == 0, f"the demo ended with {ended}"
    return directory / "demo" / "run"


def padded_inline(directory: Path) -> Path:
    """Fsdp on one rank in this process, micro-batches of two padded rows."""
    return fine_tune(directory, {"collator": {"use": "padded"}, "training": {"micro_batch_rows": 2}})


def packed_two_ranks(directory: Path) -> Path:
    """Fsdp on two ranks, packed rows."""
    return fine_tune(directory, {"collator": {"use": "packed"}, "training": {"micro_batch_tokens": 48}, "run": RAY})


def megatron_tensor_parallel(directory: Path) -> Path:
    """Megatron on two tensor-parallel ranks."""
    backend = {"use": "megatron", "tensor_parallel": 2}
    return fine_tune(directory, {"backend": backend, "training": {"micro_batch_rows": 4}, "run": RAY})


def grpo(directory: Path) -> Path:
    """GRPO over single turns with clipped ratios: two optimizer steps per batch of rollouts."""
    return reinforce(directory, {"rl": {"mini_batches": 2, "old": "score"}})


def multi_turn_tis(directory: Path) -> Path:
    """GRPO over dialogues of three turns, with truncated importance sampling, which reads the sampler's own log-probabilities."""
    return reinforce(directory, {"loss": {"use": "ppo", "corrections": [{"use": "tis"}]}, "environment": {"turns": 3}})


def ppo(directory: Path) -> Path:
    """PPO with a value head as its critic, over dialogues of two turns, packed."""
    rl = {"preset": "ppo", "group_size": 1, "groups": 8, "micro_batch_tokens": 192}
    return reinforce(directory, {"rl": rl, "collator": {"use": "packed"}, "environment": {"turns": 2}})


def dpo(directory: Path) -> Path:
    """DPO against the frozen model that the run began with."""
    write_rows(directory / "train.jsonl", 24, ("prompt", "chosen", "rejected"))
    write_rows(directory / "eval.jsonl", 6, ("prompt", "chosen", "rejected"))
    tables: Tables = {"data": {"train": "./train.jsonl", "eval": "./eval.jsonl"}, "training": {"steps": STEPS, "batch_size": 8}}
    return train(directory, "preference", tables)


def killed_and_resumed(directory: Path) -> Path:
    """The run `multi_turn_tis`, killed after its third step and resumed from the checkpoint of its second."""
    killer = directory / "kill.py"
    killer.write_text(KILLER)
    (directory / "kill").touch()
    run = {"observers": ["metrics_jsonl", "./kill.py:kill_after_step"]}
    settings: Tables = {"run": run, "checkpoint": {"every": 2}, "loss": {"use": "ppo", "corrections": [{"use": "tis"}]}}
    return reinforce(directory, {**settings, "environment": {"turns": 3}}, kills=1)


RAY = {"launch": "ray", "ranks": 2}
RUNS: Mapping[str, Callable[[Path], Path]] = {
    run.__name__: run
    for run in (
        demo,
        padded_inline,
        packed_two_ranks,
        megatron_tensor_parallel,
        grpo,
        multi_turn_tis,
        ppo,
        dpo,
        killed_and_resumed,
    )
}

KILLER = '''
"""Kills the run after its third step, if a file named `kill` lies beside this one; the file goes first, so that it happens once."""

import os
import signal
from pathlib import Path

from skyrl_engine import hookimpl


class KillAfterStep:
    @hookimpl
    def skyrl_engine_step_finished(self, event):
        order = Path(__file__).with_name("kill")
        if event.step == 3 and order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Plugin:
    @hookimpl
    def skyrl_engine_make_observer(self, config):
        return KillAfterStep()


kill_after_step = Plugin()
'''

ENVIRONMENT = '''
"""Dialogues of some turns. Tokens with even ids are worth something, and the observations are of uneven lengths."""

from attrs import field, frozen

from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task


@frozen
class Options:
    turns: int = field(default=1, kw_only=True)


class Episode:
    def __init__(self, turns, seed):
        self.turns, self.seed = turns, seed

    def begin(self):
        return ()

    def step(self, action):
        reward = sum(token % 2 == 0 for token in action.token_ids) / (1 + len(action.token_ids))
        if action.turn + 1 >= self.turns:
            return StepResult(reward, success=reward > 0.5)
        observation = "".join(chr(97 + (self.seed + place) % 26) for place in range(1 + self.seed % 5))
        return StepResult(reward / 4, done=False, messages=({"role": "user", "content": observation},))

    def close(self):
        pass


class Words:
    def __init__(self, options):
        self.options = options
        self.claims = EnvironmentClaims(max_turns=options.turns)

    def tasks(self, split):
        start = 0 if split == "train" else 1000
        prompts = ("".join(chr(97 + (7 * task + place) % 26) for place in range(1 + task % 4)) for task in range(6))
        return [Task(str(start + n), messages=({"role": "user", "content": prompt},)) for n, prompt in enumerate(prompts)]

    def open(self, task, seed):
        return Episode(self.options.turns, seed)


class Plugin:
    @hookimpl
    def skyrl_engine_config_schema(self):
        return Options

    @hookimpl
    def skyrl_engine_make_environment(self, config, context):
        return Words(config)


words = Plugin()
'''
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
Table = dict[str, Any]
Tables = dict[str, Table]


def fine_tune(directory: Path, settings: Tables) -> Path:
    """Fine-tune the small model on prompts and completions; returns the run directory."""
    for split, samples in (("train", 24), ("eval", 6)):
        write_rows(directory / f"{split}.jsonl", samples, ("prompt", "completion"))
    data = {"train": "./train.jsonl", "eval": "./eval.jsonl"}
    return train(directory, "sft", merge_tables({"data": data, "training": {"steps": STEPS, "batch_size": 8}}, settings))


def reinforce(directory: Path, settings: Tables, *, kills: int = 0) -> Path:
    """Train the small model by reinforcement in the environment above, whose options `settings["environment"]` are."""
    (directory / "words.py").write_text(ENVIRONMENT)
    environment = settings.pop("environment", {})
    tables: Tables = {
        "rl": {"steps": STEPS, "groups": 3, "group_size": 4, "max_tokens": 48, "max_prompt_tokens": 32},
        "evaluation": {"at_end": False},
        "rollouts": {"workers": 2},
    }
    return train(
        directory, "rl", merge_tables(tables, settings), environments=[{"use": "./words.py:words", **environment}], kills=kills
    )


def train(directory: Path, trainer: str, settings: Tables, *, environments: Sequence[Table] = (), kills: int = 0) -> Path:
    """Train the small model as `settings` say, again after each of `kills` kills; returns the run directory.

    What the engine would choose is said, so that a change of its choices moves no number here: padded rows in one micro-batch, float32.
    """
    import tomli_w

    write_model(directory / "model")
    tables: Tables = {
        "model": {"path": "./model", "dtype": "float32"},
        "collator": {"use": "padded"},
        "run": {"directory": "./run", "seed": 3, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1, "schedule": "linear", "weight_decay": 0.1},
    }
    name = "rl" if trainer == "rl" else "training"
    if not settings.get(name, {}).keys() & {"micro_batch_rows", "micro_batch_tokens"}:
        tables[name] = {"micro_batch_tokens": "none"}
    content = {"trainer": trainer, **merge_tables(tables, settings)}
    if environments:
        content["environments"] = list(environments)
    (directory / "run.toml").write_text(tomli_w.dumps(content))
    for _ in range(kills):
        ended = engine("run", str(directory / "run.toml"))
        assert ended == -signal.SIGKILL, f"the run ended with {ended}, not by the kill"
    ended = engine("run", str(directory / "run.toml"), *(["checkpoint.resume=true"] if kills else []))
    assert ended == 0, f"the run ended with {ended}"
    return directory / "run"


def merge_tables(first: Tables, second: Tables) -> Tables:
    """The tables of both; a key that stands in both has the value of `second`."""
    return {
        name: {**first.get(name, {}), **second.get(name, {})} for name in [*first, *(name for name in second if name not in first)]
    }


def engine(*arguments: str) -> int:
    """Run `skyrl-engine` with these arguments; returns its exit code, negative for a signal."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "skyrl_engine", "--quiet", *arguments]
    return subprocess.run(command, check=False, stdout=sys.stderr, env={**os.environ, **settings}).returncode


def write_model(directory: Path) -> None:
    """A two-layer Qwen3 with random weights and a tokenizer of characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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
    tokens = [*SPECIAL, "\n", *map(chr, range(32, 127))][:VOCABULARY]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        extra_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)


def write_rows(path: Path, rows: int, columns: Sequence[str]) -> None:
    """Write rows of texts of uneven lengths, as messages, which every version has the chat template write; the first column is the prompt, the
    others are answers to it.
    """
    draws = random.Random(path.name)

    def letters(longest: int) -> str:
        return "".join(chr(draws.randrange(97, 123)) for _ in range(draws.randrange(1, longest + 1)))

    prompt, *answers = columns

    def make_message(role: str, longest: int) -> list[dict[str, str]]:
        return [{"role": role, "content": letters(longest)}]

    drawn = (
        {prompt: make_message("user", 8), **{answer: make_message("assistant", 12) for answer in answers}} for _ in range(rows)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in drawn))


def record(run: Path) -> dict[str, Any]:
    """Return what each step computed, the losses of evaluations, and a SHA-256 of every exported weight."""
    from safetensors.numpy import load_file

    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_steps = [event["metrics"] for event in events if event["kind"] == "step"]
    steps = [{name: metrics[name] for name in RECORDED if name in metrics} for metrics in of_steps]
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
