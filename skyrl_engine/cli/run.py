"""`skyrl-engine run`: train as a configuration file says."""

import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import CommandSettings, EngineCommand, current_settings
from skyrl_engine.cli.failures import INTERRUPTED
from skyrl_engine.cli.options import file_argument, flags_of, load_config, overrides_argument, plugin_options, trust_option
from skyrl_engine.cli.terminal import echo
from skyrl_engine.visible import in_quotes

if TYPE_CHECKING:
    from skyrl_engine.config import RawConfig, ResolvedConfig
    from skyrl_engine.config.schema import EngineConfig, RewardModelConfig
    from skyrl_engine.training.loop import RunResult


@click.command(cls=EngineCommand)
@file_argument(required=False)
@overrides_argument
@plugin_options()
@click.option("--locked", is_flag=True, help="Refuse plugins other than those of the file that `skyrl-engine lock CONFIG` wrote.")
@click.option(
    "--from",
    "recorded",
    type=click.Path(path_type=Path),
    metavar="RUN.JSON",
    help="Train once more as a run did, in a new run directory, with the same plugins; in the place of CONFIG.",
)
@trust_option
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
def run(
    file: Path | None,
    overrides: tuple[str, ...],
    *,
    locked: bool,
    recorded: Path | None,
    dry_run: bool,
    trust_code: bool,
    **choices: Any,
) -> int:
    """Train with the configuration file CONFIG; section.key=value after CONFIG overrides its keys, and options override both."""
    from skyrl_engine.config import resolve

    raw = _load(file, overrides, flags_of(choices), locked=locked, recorded=recorded, trust_code=trust_code)
    return start(resolve(raw), current_settings(), dry_run=dry_run)


def _load(
    file: Path | None,
    overrides: tuple[str, ...],
    flags: Mapping[str, Any],
    *,
    locked: bool,
    recorded: Path | None,
    trust_code: bool,
) -> "RawConfig":
    from skyrl_engine.cli.lock import hold_to_lock, read_recorded_run

    if recorded is None:
        if file is None:
            raise click.UsageError("Missing argument 'CONFIG'. Name a configuration file, or a recorded run with --from.")
        raw = load_config(file, overrides, flags, trust_code=trust_code)
        return hold_to_lock(raw, file) if locked else raw
    if locked:
        raise click.UsageError("--from holds to the plugins of its run.json. Leave out --locked.")
    if file is not None and "=" not in str(file):
        raise click.UsageError(f"--from RUN.JSON takes the place of CONFIG. Leave out {file}.")
    return read_recorded_run(recorded, (*([] if file is None else [str(file)]), *overrides), flags, trust_code=trust_code)


def print_and_run(raw: "RawConfig", *, dry_run: bool) -> int:
    """Check a configuration that options made, print it as TOML, and train; all else goes to stderr. Returns the exit code."""
    from skyrl_engine.config import resolve
    from skyrl_engine.config.report import to_toml

    settings = current_settings()
    if settings.quiet:
        return start(resolve(raw), settings, dry_run=dry_run)
    # stdout holds nothing but TOML, whatever plugins print when they are loaded and at work
    with redirect_stdout(sys.stderr):
        resolved = resolve(raw)
    echo(in_quotes(to_toml(raw.table)).rstrip("\n"))
    sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        return start(resolved, settings, dry_run=dry_run)


def make_plan(resolved: "ResolvedConfig", settings: CommandSettings) -> Any:
    """Return what the run's trainer says that a run would do, with progress and warnings on stderr."""
    from skyrl_engine.cli.render import show_progress
    from skyrl_engine.cli.training import calling_trainer, warnings_to

    with (
        show_progress(quiet=settings.quiet) as display,
        warnings_to(display.warning),
        calling_trainer(resolved, "plan") as plan,
    ):
        return plan(resolved, progress=display.data)


def start(resolved: "ResolvedConfig", settings: CommandSettings, *, dry_run: bool) -> int:
    """Train, or only plan, and print the outcome; returns the exit code."""
    from skyrl_engine.cli import render

    if dry_run:
        from skyrl_engine.cli.shown_plan import show_plan

        show_plan(make_plan(resolved, settings))
        return 0
    from skyrl_engine.cli.own_process import run_under_watch
    from skyrl_engine.cli.training import train
    from skyrl_engine.config.trainers import TRAINERS

    chosen = resolved.config.run
    if chosen.launch == "ray":
        run_under_watch(settings, ranks=chosen.ranks, joined=chosen.ray_address is not None)
    result = train(resolved, settings)
    if result.metrics:
        echo("last step:")
        render.show_facts({name: f"{value:.6g}" for name, value in result.metrics.items()})
        if resolved.config.trainer == "rl" and resolved.config.rl.rollouts is None and not settings.quiet:
            from skyrl_engine.cli.rollouts import show_report

            echo("attempts:")
            show_report(result.directory)
    elif result.stopped_by is None:
        echo(f"nothing to do: the run has done its {result.step} steps already")
    code = conclude(result, allowed=resolved.config.model.trust_remote_code)
    if result.stopped_by is None and not settings.quiet and resolved.config.trainer in TRAINERS:
        following = next_command(resolved, result.directory)
        mine = [word for word, place in (("a reward", MY_REWARD), ("tasks", MY_TASKS)) if place in following]
        own = f", with {' and '.join(mine)} of your own" if mine else ""
        echo(f"next{own}: {following}", err=True)
    return code


MY_REWARD = "./my_reward.py"
MY_TASKS = "./tasks.jsonl"
"""Files of the reader's, in commands that are named where the run has none."""


def next_command(resolved: "ResolvedConfig", directory: Path) -> str:
    """Return the command that a trained run is mostly followed by; MY_REWARD and MY_TASKS stand for files of the reader's.

    Tasks are the run's own data where their rows can be tasks.

    It may run the model's own code where the run might: a run directory cannot say so itself.
    """
    from skyrl_engine.run.checkpoint import CheckpointStore
    from skyrl_engine.run.directory import RunDirectory

    run, config, place = shlex.quote(str(directory)), resolved.config, RunDirectory(directory)
    tasks = f"--data {MY_TASKS}" if (own := _find_tasks(config)) is None else own
    flag, key = (" --trust-remote-code", " model.trust_remote_code=true") if config.model.trust_remote_code else ("", "")
    if config.trainer == "rl" and config.rl.rollouts is None:
        return f"skyrl-engine rollouts show {run} --best"
    exported = place.model.is_dir()
    if not exported and not CheckpointStore(place.checkpoints).all():
        again = shlex.quote(f"run.directory={directory}-kept")
        return f"skyrl-engine run {shlex.quote(str(place.config))} {again} checkpoint.at_end=true{key}"
    if config.trainer != "reward_model":
        return f"skyrl-engine evaluate {run} --reward {MY_REWARD}:score {tasks}{flag}"
    if not exported:
        return f"skyrl-engine export {run} ./reward-model{flag}"
    models = f"--model {shlex.quote(config.model.path)} --reward-model {shlex.quote(str(place.model))}"
    return f"skyrl-engine rl {models} --env prompts {tasks}{_list_keys_of_reward_model(config.reward_model)}{key}"


def _list_keys_of_reward_model(table: "RewardModelConfig") -> str:
    """Return the keys with which rollouts ask a reward model as it was trained."""
    if table.labels == "answers":
        return ""
    separator = f"rl.reward_models.0.step_separator={json.dumps(table.step_separator)}"
    return f" rl.reward_models.0.steps=min {shlex.quote(separator)}"


def _find_tasks(config: "EngineConfig") -> str | None:
    """Return the options that take the data of a run as tasks, held-out data first; None where rows have no prompt or are elsewhere."""
    from skyrl_engine.data.sources.locate import open_source
    from skyrl_engine.errors import EngineError

    data = config.data if config.has("data") else None
    place = None if data is None else data.train if data.eval is None else data.eval
    if data is None or not isinstance(place, str) or not Path(place).expanduser().is_file():
        return None
    try:
        row = next(open_source(place, split=data.train_split, names=data.map).rows(), None)
    except EngineError:
        return None
    if row is None or not row.values.get("prompt") or row.values.get("messages"):
        return None
    names = [f"--map {shlex.quote(f'{ours}={theirs}')}" for ours, theirs in data.map.items()]
    return " ".join([f"--data {shlex.quote(place)}", *names])


def conclude(result: "RunResult", *, allowed: bool = False) -> int:
    """Print the run's directory and, when it was stopped, the command that resumes it; return the exit code.

    `allowed` says that the caller let code of the model run, which a run directory cannot say itself.
    """
    from skyrl_engine.run.directory import RunDirectory

    if result.stopped_by is None and (model := RunDirectory(result.directory).model).is_dir():
        echo(f"trained model: {model}")
    echo(f"run directory: {result.directory}")
    if result.stopped_by is None and (report := RunDirectory(result.directory).report).is_file():
        echo(f"report: {report}")
    if result.stopped_by is None:
        return 0
    directory = shlex.quote(str(result.directory))
    echo(f"stopped by {result.stopped_by} after step {result.step}. To go on:", err=True)
    more = " model.trust_remote_code=true" if allowed else ""
    echo(f"    skyrl-engine run {directory}/config.toml run.directory={directory} checkpoint.resume=true{more}", err=True)
    return INTERRUPTED
