"""Every recipe as a configuration over tiny models and data: what one product of recipes, backends and layouts runs."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from skyrl_engine.config import ResolvedConfig, load, resolve
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.proof.layouts import ParallelSizes
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.rl.run import run_rl

sys.path.insert(0, str(Path(__file__).parents[1] / "running"))

from rl_runs import WORLD
from seeing_model import write_seeing_model

Tables = Mapping[str, Any]

SIZES: Tables = {"max_position_embeddings": 128, "vocab_size": 264}
ROWS, GROUP = 8, 3

OF_DATA: Tables = {"training": {"steps": 2, "batch_size": ROWS, "micro_batch_rows": 2, "shuffle": False}}
OF_ROLLOUTS: Tables = {
    "rl": {"steps": 1, "groups": 2, "group_size": GROUP, "max_tokens": 24, "max_prompt_tokens": 64, "micro_batch_rows": 2},
    "rollouts": {"workers": 1, "retries": 0},
}

SGD: Tables = {"learning_rate": 2e5, "epsilon": 1e6, "betas": (0.0, 0.0), "max_grad_norm": 1.0}
"""Plain SGD of rate 0.2 after clipping to 1, as AdamW without memory: a step of AdamW as it is used divides by the gradient's own size, and a
wrong factor is gone.
"""


@frozen
class Recipe:
    """A way to train, by its trainer. `tables` are keys of its configuration; texts in braces are places in the folder of the material.

    `samples` says that its cells sample completions before and after the first step too, and `staged` that both steps are mini-batches of one
    call whose shards are placed before the first.
    """

    trainer: str
    tables: Tables
    samples: bool = False
    staged: bool = False


RECIPES: Mapping[str, Recipe] = {
    "sft": Recipe("sft", {}),
    "dpo": Recipe("preference", {"preference": {"preset": "dpo"}, "reference": {"path": "{folder}/other"}}),
    "kto": Recipe("preference", {"preference": {"preset": "kto"}, "reference": {"path": "{folder}/other"}, "data": "judged"}),
    "reward model": Recipe("reward_model", {}),
    "rl": Recipe("rl", {"rl": {"preset": "grpo"}}),
    "rl + reference": Recipe(
        "rl",
        {
            "rl": {"preset": "grpo"},
            "reference": {"path": "{folder}/other"},
            "loss": {"use": "ppo", "terms": [{"use": "kl", "coef": 0.1}]},
        },
    ),
    "ppo + critic": Recipe("rl", {"rl": {"preset": "ppo", "mini_batches": 1}, "model": {"path": "{folder}/critic"}}),
    "distill": Recipe(
        "sft",
        {
            "teacher": {"path": "{folder}/other"},
            # a low temperature makes gradients large against the rounding of logits
            "loss": {"use": "divergence", "temperature": 0.4},
            "reducer": {"use": "token_mean"},
        },
    ),
    "distill rows": Recipe("sft", {"loss": {"use": "top_k_divergence"}, "reducer": {"use": "token_mean"}}),
    "lora": Recipe("sft", {"model": {"lora": {"rank": 4}}}),
    "images": Recipe("sft", {"model": {"path": "{folder}/seeing/model"}, "data": "seeing/train"}),
    "generation": Recipe("rl", {"rl": {"preset": "grpo"}, "environments": [{"use": "{folder}/world.py:world"}]}, samples=True),
    "staged": Recipe("sft", {}, staged=True),
}

_DATA = {"sft": "rows", "preference": "pairs", "reward_model": "pairs"}


def write_material(folder: Path) -> None:
    """Write models (`model`, `other` of the same shape, `critic`, `seeing/model`), rows, pairs, judged answers and an environment."""
    tokenizer = TEMPLATES["chatml"].tokenizer()
    settings: dict[str, dict[str, Any]] = {"model": {}, "other": {"initializer_range": 0.05}, "critic": {"value_head": True}}
    for name, own in settings.items():
        write_model(folder / name, tokenizer=tokenizer, **SIZES, **own)
        tokenizer.save_pretrained(folder / name)
        make_parts_differ(folder / name)
        ends = [tokenizer.eos_token_id, *range(60)]
        (folder / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    write_seeing_model(folder / "seeing")
    (folder / "world.py").write_text(WORLD)
    draw = np.random.default_rng(7)

    def ids(fewest: int, most: int) -> list[int]:
        return [int(token) for token in draw.integers(60, len(tokenizer), draw.integers(fewest, most))]

    prompts = [ids(2, 9) for _ in range(ROWS)]
    rows = [_taught(draw, {"prompt_ids": prompt, "response_ids": ids(3, 16)}, len(tokenizer)) for prompt in prompts]
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n + 2} or so"} for n in range(ROWS)]
    judged = [
        {"prompt": pair["prompt"], "completion": pair[half], "label": half == "chosen"}
        for pair in pairs[: ROWS // 2]
        for half in ("chosen", "rejected")
    ]
    for name, lines in (("rows", rows), ("pairs", pairs), ("judged", judged)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _taught(draw: np.random.Generator, row: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Return the row with a teacher's three likeliest tokens of every response token."""
    count = len(row["response_ids"])
    logprobs = np.log(draw.dirichlet(np.ones(4), count)[:, :3])
    likeliest = [draw.choice(vocabulary, 3, replace=False).tolist() for _ in range(count)]
    return {**row, "teacher_ids": likeliest, "teacher_logprobs": logprobs.tolist()}


def configure(recipe: str, backend: Tables, layout: str, folder: Path, *, dtype: str = "float32") -> ResolvedConfig:
    """Return the recipe's configuration on a backend in a layout, over the material in a folder. Raises what planning refuses early."""
    sizes = ParallelSizes.parse(layout)
    tables = _tables_of(recipe, folder, "run")
    if "environments" not in tables and RECIPES[recipe].trainer == "rl":
        tables["rl"]["rollouts"] = str(_record_rollouts(folder))
    tables["backend"] = {**backend, **sizes.options}
    tables["run"] |= {"ranks": sizes.ranks, "launch": "ray" if sizes.ranks > 1 else "inline"}
    tables["model"]["dtype"] = dtype
    return _resolve(tables)


def _record_rollouts(folder: Path) -> Path:
    """Return the directory of a run whose rollouts every run by reinforcement reads; the first that asks makes it."""
    recorded = folder / "recorded"
    if not recorded.exists():
        tables = _tables_of("generation", folder, "recorded")
        run_rl(_resolve({**tables, "optimizer": {"learning_rate": 1e-3}}))
    return recorded


def _resolve(tables: dict[str, Any]) -> ResolvedConfig:
    return resolve(load(tables, ()))


def _tables_of(recipe: str, folder: Path, name: str) -> dict[str, Any]:
    chosen = RECIPES[recipe]
    tables: dict[str, Any] = {
        "trainer": chosen.trainer,
        "model": {"path": "{folder}/model"},
        "optimizer": dict(SGD),
        "evaluation": {"at_end": False},
        "run": {"seed": 5, "device": "cpu", "directory": "{folder}/" + name},
    }
    if chosen.trainer == "rl":
        tables |= OF_ROLLOUTS
    else:
        data = chosen.tables.get("data", _DATA[chosen.trainer])
        tables |= {**OF_DATA, "data": {"train": f"{{folder}}/{data}.jsonl", "cache": "{folder}/cache"}}
    for key, table in chosen.tables.items():
        if key != "data":
            tables[key] = {**tables.get(key, {}), **table} if isinstance(table, dict) else table
    placed: dict[str, Any] = json.loads(json.dumps(tables).replace("{folder}", str(folder)))
    return placed
