"""A model card of a run: the README.md of a hub repository, with metadata that the hub reads.

It tells what the run directory tells, and no secret and no place on this machine: paths become their last part.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from skyrl_engine.report.run_facts import CHOSEN, RunFacts
from skyrl_engine.tracking.flat_config import flatten_config, hide_secrets
from skyrl_engine.visible import visible_line

_TRAINED_BY: Final = {
    "sft": "supervised fine-tuning",
    "preference": "preference optimization",
    "reward_model": "training of a reward model",
    "rl": "reinforcement learning",
}
_OF_THE_MACHINE: Final = frozenset({"run.directory", "data.cache", "run.ray_address", "checkpoint.resume"})
_FILES: Final = frozenset({".json", ".jsonl", ".csv", ".parquet", ".arrow", ".py"})
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_INDEX: Final = re.compile(r"\[(\d+)\]")


def write_model_card(run: RunFacts, *, adapters: bool) -> str:
    """Return the card as Markdown under a head of YAML; `adapters` says that the weights are those of adapters alone."""
    from huggingface_hub import ModelCardData

    model = run.manifest["config"]["model"]
    base = str(model["path"])
    head: Any = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        datasets=sorted({name for name in _list_data(run) if _is_hub_id(name)}) or None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=None if model.get("classifier") or model.get("value_head") else "text-generation",
        tags=["skyrl-engine", run.trainer],
    )
    return f"---\n{head.to_yaml()}\n---\n\n" + "\n".join(_iterate_lines(run, base, adapters=adapters)) + "\n"


def _iterate_lines(run: RunFacts, base: str, *, adapters: bool) -> Iterator[str]:
    kind = "Adapters (LoRA) for" if adapters else "A model trained from"
    yield f"# {visible_line(run.name)}"
    yield f"\n{kind} {_code(base)}, by {_TRAINED_BY.get(run.trainer, run.trainer)} with skyrl_engine (trainer {_code(run.trainer)})."
    yield "\n## How it was trained\n"
    total = run.metrics.total_steps
    steps = f"{run.step:,}" if total is None else f"{run.step:,} of {total:,}"
    yield f"{steps} optimizer steps over {run.tokens:,} tokens, in {run.seconds:,.0f} s and {len(run.manifest['sessions'])} session(s)."
    if (best := run.best) is not None and run.manifest["config"].get("evaluation", {}).get("best") is not None:
        yield f"The best evaluation was that of step {best.step:,}."
    yield from _iterate_table("Data", "", [(name, "") for name in _list_data(run)])
    yield from _iterate_table("Hyperparameters", "All others have their defaults.\n", _list_settings(run))
    last = ((name, f"{value:.6g}") for name, value in run.list_last_metrics().items())
    yield from _iterate_table("Metrics", "Those of the last step, and of the last evaluation.\n", last)
    yield from _iterate_table("Plugins", "", run.list_plugins())
    environment = run.manifest["environment"]
    engine = ("skyrl-engine", str(run.manifest["engine"]["version"]))
    libraries = [(name, str(version)) for name, version in environment.get("libraries", {}).items() if version is not None]
    yield from _iterate_table("Versions", "", [engine, ("python", str(environment.get("python"))), *libraries])


def _iterate_table(title: str, words: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a heading with a table of these rows, or a list where they have no values; nothing where there are none."""
    rows = list(rows)
    if not rows:
        return
    yield f"\n## {title}\n"
    if words:
        yield words
    if not any(value for _, value in rows):
        yield from (f"- {_code(name)}" for name, _ in rows)
        return
    yield "| | |\n|---|---|"
    yield from (f"| {_code(name)} | {_code(value)} |" for name, value in rows)


def _list_settings(run: RunFacts) -> list[tuple[str, str]]:
    """Return the keys that were set, but for places of this machine alone, with their values."""
    origins = {_INDEX.sub(r".\1", key) for key, origin in run.manifest["origins"].items() if origin != CHOSEN}
    flat = flatten_config(_without_places(run.manifest["config"]))
    return [
        (key, str(value))
        for key, value in flat.items()
        if key not in _OF_THE_MACHINE and (key in origins or any(key.startswith(f"{each}.") for each in origins))
    ]


def _list_data(run: RunFacts) -> list[str]:
    """Return what was trained and evaluated on: files by their names, datasets by their hub ids, environments by their plugins."""
    config = run.manifest["config"]
    data, environments = config.get("data") or {}, config.get("environments") or []
    named = [data.get("train"), data.get("eval")]
    named += [each.get(key) for each in environments for key in ("use", "data", "eval_data")]
    flat = [name for each in named for name in (each if isinstance(each, list | tuple) else [each]) if isinstance(name, str)]
    return list(dict.fromkeys(flat))


def _is_hub_id(name: str) -> bool:
    """Return True for NAMESPACE/NAME that is no file or folder here."""
    return _HUB_ID.fullmatch(name) is not None and PurePath(name).suffix not in _FILES and not Path(name).exists()


def _without_places(value: Any) -> Any:
    """Return a configuration whose paths of this machine are their last parts."""
    if isinstance(value, Mapping):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../")):
        return PurePath(value).name or value
    return value


def _code(text: str) -> str:
    """Return a text as code on one line of a table, without secrets."""
    return "`" + visible_line(hide_secrets(_without_places(text))).replace("`", "'").replace("|", "\\|") + "`"
