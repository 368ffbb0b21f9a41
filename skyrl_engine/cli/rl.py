"""`skyrl-engine rl`: train by reinforcement without a configuration file; the one it makes is printed."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from skyrl_engine.config import Option

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.options import (
    RUN_KEYS,
    flags_of,
    load_config,
    map_option,
    model_option,
    overrides_argument,
    plugin_options,
    run_options,
    values_by_key,
)
from skyrl_engine.cli.run import print_and_run

_KEYS = {
    **RUN_KEYS,
    "rollouts": "rl.rollouts",
    "preset": "rl.preset",
    "steps": "rl.steps",
    "groups": "rl.groups",
    "group_size": "rl.group_size",
    "max_tokens": "rl.max_tokens",
    "temperature": "rl.temperature",
    "micro_batch_rows": "rl.micro_batch_rows",
}


@click.command(cls=EngineCommand, keys=_KEYS, trainer="rl")
@overrides_argument
@model_option
@click.option(
    "--env",
    multiple=True,
    metavar="ENVIRONMENT",
    help="Where tasks and rewards come from: an environment plugin, such as reasoning_gym:spell_backward. Give it again for a mixture.",
)
@click.option("--reward", multiple=True, metavar="FUNCTION", help="A reward function, ./file.py:name; several are added up.")
@click.option(
    "--reward-model",
    multiple=True,
    metavar="MODEL",
    help="A sequence classifier whose value of an attempt is added to its reward. Give it again for another.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="DATA",
    help="Tasks for --reward, or for an --env that reads tasks: a file, a folder or a hub id.",
)
@map_option
@click.option("--eval-data", metavar="DATA", help="Held-out tasks, for the same.")
@click.option("--eval-fraction", type=float, metavar="SHARE", help="Share of --data to hold out instead.")
@click.option(
    "--rollouts", metavar="PATH", help="Train on recorded rollouts instead of sampling: a run directory, or an exported file."
)
@click.option("--tool", multiple=True, metavar="FUNCTION", help="A function that the model may call, ./file.py:name.")
@click.option(
    "--preset",
    metavar="NAME",
    help="A published recipe: grpo (the default), dapo, dr_grpo, gspo, cispo, rloo, reinforce_pp, ppo, online_dpo, on_policy_distill.",
)
@click.option("--steps", type=int, metavar="STEPS", help="Batches of rollouts to train on.")
@click.option("--groups", type=int, metavar="TASKS", help="Tasks per step.")
@click.option("--group-size", type=int, metavar="ATTEMPTS", help="Attempts per task.")
@click.option(
    "--max-tokens",
    type=int,
    metavar="TOKENS",
    help="Most tokens of an attempt after its prompt, over all turns, observations of the environment included.",
)
@click.option("--temperature", type=float, metavar="TEMPERATURE", help="Temperature to sample with.")
@run_options
@plugin_options("rl")
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
def rl(
    overrides: tuple[str, ...],
    *,
    env: tuple[str, ...],
    reward: tuple[str, ...],
    reward_model: tuple[str, ...],
    data: tuple[str, ...],
    columns: dict[str, str] | None,
    eval_data: str | None,
    eval_fraction: float | None,
    tool: tuple[str, ...],
    dry_run: bool,
    **options: Any,
) -> int:
    """Train MODEL by reinforcement, on the tasks of ENVIRONMENT, of DATA with a reward FUNCTION, or on recorded rollouts.

    The configuration that the options make is printed, as TOML: `skyrl-engine rl ... > my.toml` keeps it for `skyrl-engine run my.toml`. All
    else goes to stderr.
    """
    from skyrl_engine.config import Option

    tasks = {"data": _one_or_list(data), "map": columns, "eval_data": eval_data, "eval_fraction": eval_fraction}
    environments = environment_tables(env, reward, tool, by_option(tasks))
    current_settings().mapped = mapped_by_option(env, reward)
    flags = values_by_key(_KEYS, options)
    if environments:
        flags["environments"] = Option("--env" if env else "--reward", environments)
    if reward_model:
        flags["rl.reward_models"] = Option("--reward-model", [{"path": path} for path in reward_model])
    raw = load_config(None, overrides, {"trainer": "rl", **flags, **flags_of(options)})
    return print_and_run(raw, dry_run=dry_run)


def by_option(tasks: Mapping[str, Any]) -> "dict[str, Option]":
    """Return those options of an environment that were given, each with the name of the option that gave it."""
    from skyrl_engine.config import Option

    return {name: Option(f"--{name.replace('_', '-')}", value) for name, value in tasks.items() if value is not None}


def environment_table(reference: str) -> dict[str, Any]:
    """Return the table of an environment: the text after the last colon of a name is its task, unless it is a distribution's plugin."""
    from skyrl_engine.registry.known import list_first_party

    name, colon, task = reference.partition(":")
    if colon and name in list_first_party("environment"):
        return {"use": name, "id" if name == "gymnasium" else "task": task}
    return {"use": reference}


def environment_tables(
    env: tuple[str, ...], reward: tuple[str, ...], tools: tuple[str, ...], tasks: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the tables of the environments that are named, and that of `function` where a reward is given.

    `tasks` are its options `data`, `map`, `eval_data` and `eval_fraction`, None where they are not given. Without a reward they are those
    of the one environment, which may be a decorated reward. Each key names the option that gave it, or nothing where a run did.
    """
    from skyrl_engine.config import Option

    tables = [
        {key: Option("--env", value) for key, value in environment_table(plugin).items()} if reward else environment_table(plugin)
        for plugin in env
    ]
    task_options = {name: value for name, value in tasks.items() if value is not None}
    if reward:
        if "data" not in task_options:
            raise click.UsageError("--reward needs tasks. Give --data FILE, whose rows have a prompt.")
        table: dict[str, Any] = {"use": "function", "reward": Option("--reward", _one_or_list(reward)), **task_options}
        return [*tables, {**table, "tools": Option("--tool", list(tools))} if tools else table]
    if tools:
        raise click.UsageError("--tool is for tasks with a reward function. Give --reward ./file.py:name too.")
    if task_options and len(tables) != 1:
        option = f"--{next(iter(task_options)).replace('_', '-')}"
        raise click.UsageError(f"{option} is for tasks with a reward function. Give --reward ./file.py:name too, or one --env.")
    return [{**table, **task_options} for table in tables]


def mapped_by_option(env: Collection[str], reward: Collection[str]) -> str | None:
    """Return the table of column names that --map fills: that of the reward's tasks, or of the one environment; None where it has none."""
    number = len(env) if reward else 0 if len(env) == 1 else None
    return None if number is None else f"environments.{number}.map"


def _one_or_list(values: tuple[str, ...]) -> str | list[str] | None:
    """Return several values as a list, and None for no value."""
    return list(values) if len(values) > 1 else next(iter(values), None)
