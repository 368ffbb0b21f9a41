"""Runs by reinforcement whose attempts come from `vllm`, or from `hf` for comparison: paid for vowels, on a model of random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_engine.config import load, resolve
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.rl.run import run_rl

REWARD = "def score(text, task):\n    return sum(letter in 'aeiou' for letter in text) / max(1, len(text))\n"

PROMPTS = tuple("go " * count for count in range(1, 5))


def reinforce(
    tmp_path: Path,
    generator: Mapping[str, Any],
    name: str = "run",
    *,
    prompts: tuple[str, ...] = PROMPTS,
    sizes: Mapping[str, int] | None = None,
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **rl: Any,
) -> Path:
    """Run a few steps in the folder `name` and return it. `sizes` are the model's, the other tables are added to the configuration."""
    tokenizer = TEMPLATES["chatml"].tokenizer()
    write_model(tmp_path / "model", tokenizer=tokenizer, **(sizes or {}))
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "vowels.py").write_text(REWARD)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    table = {
        "trainer": "rl",
        "model": {"path": str(tmp_path / "model"), **(model or {})},
        "rl": {"steps": 3, "groups": 2, "group_size": 3, "max_tokens": 20, "max_prompt_tokens": 64, "max_gap": 1e-3, **rl},
        "environments": [{"use": "function", "reward": f"{tmp_path / 'vowels.py'}:score", "data": str(tmp_path / "tasks.jsonl")}],
        "rollouts": {"workers": 1},
        "evaluation": {"at_end": False},
        "optimizer": {"learning_rate": 1e-2, **(optimizer or {})},
        "generator": dict(generator),
        "run": {"directory": str(tmp_path / name), "device": "cpu"},
    }
    return run_rl(resolve(load(table, ()))).directory
