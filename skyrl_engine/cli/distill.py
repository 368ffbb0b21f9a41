"""`skyrl-engine distill`: learn from a teacher without a configuration file; the one it makes is printed."""

from typing import Any

import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.options import (
    RUN_KEYS,
    columns_by_key,
    flags_of,
    load_config,
    map_option,
    model_option,
    one_or_several,
    overrides_argument,
    plugin_options,
    run_options,
    values_by_key,
)
from skyrl_engine.cli.rl import environment_table
from skyrl_engine.cli.run import print_and_run

_ON_ROWS = {
    **RUN_KEYS,
    "teacher": "teacher.path",
    "data": "data.train",
    "batch_size": "training.batch_size",
    "steps": "training.steps",
    "micro_batch_rows": "training.micro_batch_rows",
    "sample_share": "sampling.share",
    "max_tokens": "sampling.max_tokens",
}
_ON_SAMPLES = {
    **RUN_KEYS,
    "teacher": "teacher.path",
    "groups": "rl.groups",
    "group_size": "rl.group_size",
    "max_tokens": "rl.max_tokens",
    "steps": "rl.steps",
    "micro_batch_rows": "rl.micro_batch_rows",
}


@click.command(
    cls=EngineCommand, keys={**_ON_ROWS, **_ON_SAMPLES}, trainer="rl", preset="on_policy_distill", trainers=("sft", "rl")
)
@overrides_argument
@model_option
@click.option(
    "--teacher",
    metavar="MODEL",
    help="The model to learn from, on the same ranks; it has the student's tokenizer, or --loss is uld or gold.",
)
@click.option(
    "--prompts", multiple=True, callback=one_or_several, metavar="DATA", help="What to sample at: a file, a folder or a hub id."
)
@click.option("--env", metavar="ENVIRONMENT", help="An environment plugin to sample in, instead of --prompts.")
@click.option("--groups", type=int, metavar="PROMPTS", help="Prompts per step.")
@click.option("--group-size", type=int, metavar="ATTEMPTS", help="Samples per prompt.")
@click.option(
    "--max-tokens",
    type=int,
    metavar="TOKENS",
    help="Most tokens of a sample after its prompt, over all turns, observations of the environment included.",
)
@click.option(
    "--sample-share",
    type=float,
    metavar="SHARE",
    help="Share of steps on --data that train on the student's own answers to its prompts, as GKD's lambda: needs --teacher or teacher.url.",
)
@click.option(
    "--data",
    multiple=True,
    callback=one_or_several,
    metavar="DATA",
    help="Rows of prompts and answers to learn on; without --teacher they hold a teacher's likeliest tokens.",
)
@map_option
@click.option("--batch-size", type=int, metavar="SAMPLES", help="Rows of one optimizer step, over all ranks.")
@click.option("--steps", type=int, metavar="STEPS", help="Optimizer steps.")
@run_options
@plugin_options("rl")
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
def distill(
    overrides: tuple[str, ...],
    *,
    prompts: str | list[str] | None,
    env: str | None,
    columns: dict[str, str] | None,
    dry_run: bool,
    **options: Any,
) -> int:
    """Teach MODEL what a teacher knows: on MODEL's own samples, which the teacher scores, or on rows of data.

    Samples are trainer rl's, with the preset on_policy_distill. Rows are trainer sft's: with --teacher by the loss divergence, over the whole
    vocabulary, and without by the loss top_k_divergence, of rows that hold a teacher's likeliest tokens. With --sample-share
    some steps train on the student's own answers to the prompts of the rows. The configuration that the options
    make is printed, as TOML: `skyrl-engine distill ... > my.toml` keeps it for `skyrl-engine run my.toml`. All else goes to stderr.
    """
    from skyrl_engine.config import Option, with_defaults

    sampled = prompts is not None or env is not None
    if options["data"] is None and not sampled:
        raise click.UsageError(
            "there is nothing to learn on. Give --data, rows of prompts and answers, or --teacher with one of --prompts and --env."
        )
    if options["data"] is not None and sampled:
        raise click.UsageError("--prompts and --env are for the student to sample at, instead of --data. Leave them out.")
    keys, others = (_ON_SAMPLES, _ON_ROWS) if sampled else (_ON_ROWS, _ON_SAMPLES)
    alien = next((name for name in others if name not in keys and options[name] is not None), None)
    if alien is not None:
        raise click.UsageError(
            f"--{alien.replace('_', '-')} goes with {'--prompts or --env' if keys is _ON_ROWS else '--data'}. Leave it out."
        )
    flags: dict[str, Any] = {**values_by_key(keys, options), **flags_of(options)}
    if keys is _ON_ROWS:
        flags = {"trainer": "sft", **flags, **columns_by_key(columns)}
    else:
        if prompts is not None and env is not None:
            raise click.UsageError(
                "there are two places to sample at. Give one of --prompts FILE, whose rows have a prompt, and --env."
            )
        table: dict[str, Any] = {"use": "prompts", "data": prompts} if env is None else environment_table(env)
        if columns is not None:
            table["map"] = Option("--map", columns)
        current_settings().mapped = "environments.0.map"
        environments = Option("--prompts" if env is None else "--env", [table])
        flags = {"trainer": "rl", "environments": environments, **flags}
    raw = load_config(None, overrides, flags)
    if sampled and not {"teacher.path", "teacher.url"} & raw.origins.keys():
        raise click.UsageError("samples are scored by a teacher. Give --teacher, or teacher.url=... and teacher.model=....")
    if keys is _ON_ROWS:
        taught = "teacher.path" in raw.origins
        if "teacher.url" in raw.origins and not {"teacher.top_k", "loss.use"} & raw.origins.keys():
            raise click.UsageError(
                "a server is asked for its likeliest tokens by their number. Give teacher.top_k=..., or --loss teacher_kl."
            )
        defaults = {"loss.use": "divergence" if taught else "top_k_divergence"}
    else:
        defaults = {"rl.preset": "on_policy_distill"}
    return print_and_run(with_defaults(raw, defaults, "skyrl-engine distill"), dry_run=dry_run)
