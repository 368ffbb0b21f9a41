"""The help of an option that takes a value: its default, from the configuration where it sets a key, and one example."""

from collections.abc import Mapping

import click

EXAMPLES: Mapping[str, str] = {
    "--a": "fsdp",
    "--advantage": "rloo",
    "--answer": "olleh",
    "--author": "Ada",
    "--b": "megatron",
    "--backend": "megatron",
    "--base": "./my-base",
    "--batch-size": "64",
    "--collator": "packed",
    "--compare": "./my-model",
    "--data": "./data.jsonl",
    "--directory": "./plugins",
    "--distribution": "acme-losses",
    "--env": "reasoning_gym:spell_backward",
    "--epochs": "2",
    "--eval-data": "./held-out.jsonl",
    "--eval-fraction": "0.1",
    "--every": "5",
    "--examples": "100",
    "--family": "llama",
    "--from": "./runs/my-run/run.json",
    "--generator": "hf",
    "--gpu-memory": "80GiB",
    "--grep": "Sorry",
    "--group-size": "16",
    "--groups": "32",
    "--keep-best": "1",
    "--keep-last": "2",
    "--keep-rollouts": "100",
    "--index": "https://plugins.example/index.json",
    "--kind": "loss",
    "--launch": "ray",
    "--layout": "tp2xpp2",
    "--layout-a": "dp2",
    "--learning-rate": "3e-6",
    "--lengths": "./lengths.txt",
    "--license": "MIT",
    "--limit": "20",
    "--lora": "8",
    "--loss": "./my_loss.py:focal",
    "--map": "prompt=question",
    "--max-length": "2048",
    "--max-tokens": "1024",
    "--merger": "ordered",
    "--metric": "loss",
    "--micro-batch-rows": "4",
    "--micro-batch-tokens": "8192",
    "--min-p": "0.05",
    "--min-reward": "0.5",
    "--model": "./my-model",
    "--older-than": "7d",
    "--only": "sft",
    "--options": "./options.toml",
    "--out": "./attempts.jsonl",
    "--output": "./my-run",
    "--placement": "process",
    "--plant": "per_microbatch_mean",
    "--precision": "bfloat16",
    "--preset": "dapo",
    "--profile": "steps=3",
    "--prompt": "'What is 2 + 3?'",
    "--prompts": "./prompts.jsonl",
    "--ranks": "2",
    "--reducer": "sum",
    "--reference": "./my-reference",
    "--report": "./bug.md",
    "--reward": "./my_reward.py:score",
    "--reward-model": "./my-reward-model",
    "--rollouts": "./runs/my-run",
    "--run": "./runs/my-run",
    "--sample-share": "0.5",
    "--samples": "4",
    "--script": "./bokeh.min.js",
    "--seed": "1",
    "--set": "run.seed=1",
    "--sort": "size",
    "--split": "train",
    "--step": "100",
    "--steps": "200",
    "--stop": "'</answer>'",
    "--system": "'Be brief.'",
    "--task": "3",
    "--tasks": "200",
    "--teacher": "./my-teacher",
    "--temperature": "0.7",
    "--template": "./chat.jinja",
    "--time-limit": "600",
    "--to": "parquet",
    "--tokens": "20",
    "--tolerance": "1e-4",
    "--tool": "./my_tools.py:search",
    "--top-k": "20",
    "--top-p": "0.9",
    "--trainer": "rl",
}
"""A value that every command with the option takes, unless OF_COMMAND has another for it."""

OF_COMMAND: Mapping[tuple[str, str], str] = {
    ("demo", "--model"): "smollm2",
    ("evaluate", "--output"): "./attempts.jsonl",
    ("index", "--output"): "./catalogue",
    ("preference", "--preset"): "simpo",
    ("push", "--model"): "./my-exported-model",
    ("reward-model", "--preset"): "steps",
    ("show", "--set"): "size=100",
    ("try", "--set"): "size=100",
    ("verify", "--set"): "gamma=1.5",
}


def explain(option: click.Option, command: str, key: str | None, trainer: str | None, preset: str | None = None) -> None:
    """Add an example, and the default where click would show none, to an option's help."""
    if option.is_flag or option.count:
        return
    name = max(option.opts, key=len)
    example = OF_COMMAND.get((command, name), EXAMPLES.get(name))
    if example is not None:
        option.help = f"{option.help} Example: {name} {example}"
    if not option.required and not option.show_default:
        option.show_default = "none" if key is None else _default(key, trainer, preset)


def _default(key: str, trainer: str | None, preset: str | None) -> str:
    from skyrl_engine.config.report import default_of

    return default_of(key, trainer, preset)
