"""`skyrl-engine evaluate`: attempt tasks with a model, and say how often it is right."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.key_values import key_values
from skyrl_engine.cli.options import (
    load_config,
    map_option,
    resolve_read,
    select_given_options,
    trust_option,
    values_by_key,
)
from skyrl_engine.cli.read_keys import ReadKeys
from skyrl_engine.cli.run_config import find_config, keep_model_tables
from skyrl_engine.cli.terminal import echo, echo_json
from skyrl_engine.scratch import scratch_folder

if TYPE_CHECKING:
    from skyrl_engine.config import RawConfig
    from skyrl_engine.training.rl.standalone_evaluation import EvaluationReport

_COMMAND = "skyrl-engine evaluate"

READ = ReadKeys(
    frozenset(
        {
            "trainer",
            *(
                f"model.{key}"
                for key in ("path", "tokenizer", "revision", "dtype", "trust_remote_code", "rotary_length", "chat_template")
            ),
            "model.lora.path",
            *(f"rl.{key}" for key in ("max_tokens", "max_prompt_tokens", "stop_strings", "history", "template", "reward_models")),
            *(f"run.{key}" for key in ("seed", "launch", "ranks", "oversubscribe", "device", "ray_address")),
            *(f"rollouts.{key}" for key in ("workers", "timeout_s", "retries", "max_failure_share")),
            *(f"evaluation.{key}" for key in ("samples", "tasks", "temperature")),
            "plugins",
            "environments",
            "generator",
            "backend",
        }
    ),
    but=frozenset({"environments.weight"}),
)
"""Keys of a configuration that an evaluation reads; any other is refused on its command line."""

OF_REWARD_MODEL = ReadKeys(
    frozenset({"model.logits_per_chunk", "rl.micro_batch_rows", "rl.micro_batch_tokens", "collator", "merger"})
)
"""Keys that it reads too where a reward model values the attempts."""

_INSTEAD = {
    "rl.temperature": "Set evaluation.temperature",
    "rl.group_size": "Set evaluation.samples",
    "rl.groups": "Set evaluation.tasks",
    "environments.weight": "Remove it: environments have equal shares of evaluation.tasks",
    "run.directory": "Remove it: no run directory is written, and --output FILE keeps the attempts",
    "run.observers": "Remove it: observers watch training",
    "evaluation": "Remove it: the model is evaluated once, now",
    "checkpoint": "Remove it: no checkpoint is written, and --step chooses one of RUN",
    "data": "Remove it: --data takes the tasks",
    "model.lora": "Remove it: adapters of model.lora.path bring their own",
}
"""Remedies for keys that are not read, by key or table; for all others: nothing is trained."""

_KEYS = {
    "samples": "evaluation.samples",
    "tasks": "evaluation.tasks",
    "temperature": "evaluation.temperature",
    "max_tokens": "rl.max_tokens",
    "seed": "run.seed",
}


@click.command(cls=EngineCommand, keys=_KEYS, trainer="rl", reads=READ)
@click.argument("run", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
@key_values("[section.key=value ...]", "Any other key of the configuration; the same as section.key=value.")
@click.option(
    "--model", metavar="MODEL", help="A Hugging Face directory or hub id, instead of RUN; beside it, the base of RUN's adapters."
)
@click.option(
    "--step", type=click.IntRange(min=0), metavar="STEP", help="RUN's checkpoint of this step, instead of its trained model."
)
@click.option(
    "--env", multiple=True, metavar="ENVIRONMENT", help="Where tasks and rewards come from; without it, the environments of RUN."
)
@click.option("--reward", multiple=True, metavar="FUNCTION", help="A reward function, ./file.py:name; several are added up.")
@click.option(
    "--data",
    multiple=True,
    metavar="DATA",
    help="Tasks for --reward, or for an --env that reads tasks: a file, a folder or a hub id.",
)
@map_option
@click.option("--tool", multiple=True, metavar="FUNCTION", help="A function that the model may call, ./file.py:name.")
@click.option("-k", "--samples", type=click.IntRange(min=1), default=1, show_default=True, metavar="K", help="Attempts per task.")
@click.option("--tasks", type=click.IntRange(min=1), metavar="N", help="Tasks to attempt; without it, all of --data, otherwise 64.")
@click.option(
    "--split", type=click.Choice(["eval", "train"]), default="eval", show_default=True, help="Held-out tasks, or those to train on."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="TEMPERATURE",
    help="Temperature to sample with; without it, 1 for several attempts per task, and 0 (the most likely token) for one.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Most tokens of an attempt after its prompt, over all turns, observations of the environment included.",
)
@click.option("--seed", type=int, metavar="SEED", help="Seed of every random number.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all attempts, as `rollouts export` does: .jsonl or .parquet.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that came with the model. Only for code you have read.")
@trust_option
def evaluate(
    run: Path | None,
    *,
    model: str | None,
    step: int | None,
    env: tuple[str, ...],
    reward: tuple[str, ...],
    data: tuple[str, ...],
    columns: dict[str, str] | None,
    tool: tuple[str, ...],
    split: str,
    output: Path | None,
    trust_remote_code: bool,
    trust_code: bool,
    as_json: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> int:
    """Attempt tasks with the model of the run directory RUN, or with MODEL, and print average reward and pass@k.

    A run by reinforcement brings its environments and lengths along, and to --reward alone its tasks. Code that it names outside of its
    directory runs where the run is your own, as you made it, or with --trust-code. The numbers are those of an evaluation during a run of the
    same seed, temperature and tasks.
    """
    from skyrl_engine.cli.own_process import run_under_watch
    from skyrl_engine.cli.render import show_progress
    from skyrl_engine.cli.rl import environment_tables, mapped_by_option
    from skyrl_engine.cli.training import warnings_to
    from skyrl_engine.config import Option, with_defaults
    from skyrl_engine.training.export import ExportChoices, export_checkpoint
    from skyrl_engine.training.rl.standalone_evaluation import evaluate_model

    if run is not None and "=" in str(run) and not run.exists():
        run, overrides = None, (str(run), *overrides)
    if run is None and model is None:
        raise click.UsageError("There is nothing to evaluate. Give RUN, a run directory, or --model MODEL.")
    if run is None and step is not None:
        raise click.UsageError("--step chooses a checkpoint of RUN, a run directory, which is not given.")
    if output is not None and output.suffix not in (".jsonl", ".parquet"):
        raise click.UsageError(f"--output {output} ends neither in .jsonl nor in .parquet.")
    tasks = _one(data)
    of_run = _tasks_of(run, tool) if run is not None and reward and tasks is None else {}
    named = {} if columns is None else {"map": {**of_run.get("map", {}), **columns}}
    of_tasks = {} if tasks is None else dict.fromkeys(("data", "eval_data"), Option("--data", tasks))
    environments = environment_tables(env, reward, tool, {**of_tasks, **of_run, **named})
    settings = current_settings()
    settings.mapped = mapped_by_option(env, reward)
    with scratch_folder("evaluate") as scratch:
        folder = None if run is None else _model_of(run, step, scratch)
        flags: dict[str, Any] = {"trainer": "rl", "model.path": model if folder is None else str(folder)}
        flags |= values_by_key(_KEYS, select_given_options(options))
        if trust_remote_code:
            flags["model.trust_remote_code"] = Option("--trust-remote-code", value=True)
        if environments:
            flags["environments"] = Option("--env" if env else "--reward", environments)
        file, part = (None, None) if run is None else (find_config(run), _keep_run_tables)
        raw = load_config(file, overrides, flags, trust_code=trust_code, part=part)
        raw = with_defaults(raw, {"evaluation.samples": 1, **({"evaluation.tasks": sys.maxsize} if data else {})}, _COMMAND)
        table = raw.table["evaluation"]
        is_single = isinstance(table, dict) and table["samples"] == 1
        raw = with_defaults(raw, {"evaluation.temperature": 0.0 if is_single else 1.0}, _COMMAND)
        # before anything of the run is loaded: it says whose code may run
        resolved = resolve_read(raw, _remedy_for(raw))
        chosen = resolved.config.run
        if chosen.launch == "ray":
            run_under_watch(settings, ranks=chosen.ranks, joined=chosen.ray_address is not None)
        with show_progress(quiet=settings.quiet or as_json) as display, warnings_to(display.warning):
            if run is not None and folder is not None and folder.is_relative_to(scratch):
                allowed = resolved.config.model.trust_remote_code
                display.data("writing the checkpoint as a model", 0, 0)
                export_checkpoint(run, folder, step, ExportChoices(model=model, merge=True, trust_remote_code=allowed))
            report = evaluate_model(
                resolved, split="train" if split == "train" else "eval", progress=display.data, trained_on=_read_training_data(run)
            )
    if output is not None:
        _write(report, output)
    if as_json:
        echo_json({"tasks": len(report.groups), "metrics": dict(report.metrics)})
        return 0
    _show(report)
    if output is not None:
        echo(f"attempts: {output}")
    return 0


def _remedy_for(raw: "RawConfig") -> Callable[[str], str | None]:
    """Return what answers a key that this evaluation does not read with a remedy, and one that it reads with None."""
    table = raw.table.get("rl")
    values = isinstance(table, Mapping) and bool(table.get("reward_models"))

    def remedy(key: str) -> str | None:
        if READ.has(key) or (values and OF_REWARD_MODEL.has(key)):
            return None
        if OF_REWARD_MODEL.has(key):
            return "Remove it, or add to rl.reward_models: it is about how a reward model computes"
        plain = re.sub(r"\[\d+\]", "", key)
        names = (plain.rsplit(".", count)[0] for count in range(plain.count(".") + 1))
        return next((_INSTEAD[name] for name in names if name in _INSTEAD), "Remove it: an evaluation trains nothing")

    return remedy


def _one(data: tuple[str, ...]) -> str | None:
    """Return tasks as held-out ones: those of --data are all to be attempted."""
    if len(data) > 1:
        raise click.UsageError("--data is given more than once. Put all tasks in one file or folder.")
    return data[0] if data else None


def _keep_run_tables(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an evaluation takes over from a run's configuration. Options and overrides win over it."""
    tables = keep_model_tables(table)
    if table.get("trainer") == "rl":
        tables |= {name: table[name] for name in ("generator", "rollouts", "environments") if table.get(name)}
    return tables


def _read_training_data(run: Path | None) -> dict[str, Any] | None:
    """Return what the manifest of a run says of its training data; None where there is no run, no manifest or no such data."""
    from skyrl_engine.run.directory import RunDirectory
    from skyrl_engine.run.manifest import read_manifest

    manifest = None if run is None else read_manifest(RunDirectory(run).manifest)
    data = (manifest or {}).get("data")
    train = data.get("train") if isinstance(data, dict) else None
    return train if isinstance(train, dict) else None


def _tasks_of(run: Path, tools: tuple[str, ...]) -> dict[str, Any]:
    """Return where the tasks of a run are, as options of an environment, for a reward that is given again.

    Nothing where the run has no such tasks, or of several environments. Refuses to leave its tools out in silence.
    """
    import attrs

    from skyrl_engine.config.reading.sources import read_file
    from skyrl_engine.environments import TableOptions

    table, _ = read_file(find_config(run))
    listed = table.get("environments")
    with_data = (
        [environment for environment in listed if isinstance(environment, dict) and "data" in environment]
        if isinstance(listed, list)
        else []
    )
    if len(with_data) != 1 or len(with_data) < len(listed or ()):
        return {}
    if with_data[0].get("tools") and not tools:
        raise click.UsageError(f"The tasks of {run} have tools. Give --tool FUNCTION too, or tasks of your own with --data.")
    return {field.name: with_data[0][field.name] for field in attrs.fields(TableOptions) if field.name in with_data[0]}


def _model_of(run: Path, step: int | None, scratch: Path) -> Path:
    """Return the place of a whole model: what the run exported, or else where its checkpoint will be exported to, adapters merged."""
    from skyrl_engine.run.directory import RunDirectory

    exported = RunDirectory(run).model
    if step is None and exported.is_dir() and not (exported / "adapter_config.json").exists():
        return exported
    return scratch / "model"


def _write(report: "EvaluationReport", output: Path) -> None:
    from skyrl_engine.rollout.exported import rows_of, write_rows

    def decode(ids: Any) -> str:
        return str(report.tokenizer.decode(list(ids)))

    rows = (row for group in report.groups for row in rows_of(group, decode=decode))
    write_rows(rows, output, "parquet" if output.suffix == ".parquet" else "jsonl")


def _show(report: "EvaluationReport") -> None:
    from skyrl_engine.cli.render import show_table

    prefix = "evaluation/"
    rows = []
    for name, value in report.metrics.items():
        low, high = report.metrics.get(f"{name}_low"), report.metrics.get(f"{name}_high")
        if name.endswith(("_low", "_high")):
            continue
        between = "" if low is None or high is None else f"{low:.4f} to {high:.4f}"
        rows.append((name.removeprefix(prefix), f"{value:.4f}", between))
    echo(f"{len(report.groups):,} tasks of {', '.join(report.names)}")
    show_table(("", "mean", "95 % of resampled tasks"), rows)
