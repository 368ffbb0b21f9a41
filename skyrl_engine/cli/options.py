"""Options and arguments that several commands share, and the configuration they make together."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from skyrl_engine.cli.key_values import key_values
from skyrl_engine.cli.terminal import echo
from skyrl_engine.config.find_trainer import get_trainer
from skyrl_engine.registry.kinds import KINDS

if TYPE_CHECKING:
    from skyrl_engine.config import Option, RawConfig, ResolvedConfig
    from skyrl_engine.config.trust.consent import Consent
    from skyrl_engine.errors import Problem

Function = TypeVar("Function", bound=Callable[..., Any])

OVERRIDES = "[section.key=value ...]"


def plugin_options(trainer: str | None = None, *, without: Collection[str] = ()) -> Callable[[Function], Function]:
    """Add an option for each kind of plugin that has one, such as `--loss`, which takes a reference.

    `trainer` leaves out the kinds that it does not use (None: those of any trainer stay); `without` leaves out more.
    """

    def decorate(function: Function) -> Function:
        used = get_trainer(trainer).kinds if trainer is not None else tuple(KINDS)
        for kind in reversed(_kinds()):
            if kind in used and kind not in without:
                function = click.option(
                    f"--{kind}", metavar="REFERENCE", help=f"The {kind} plugin: name, distribution:name or ./file.py:name."
                )(function)
        return function

    return decorate


def _kinds() -> list[str]:
    return [kind.name for kind in KINDS.values() if kind.option]


RUN_KEYS: Mapping[str, str] = {
    "model": "model.path",
    "learning_rate": "optimizer.learning_rate",
    "output": "run.directory",
    "launch": "run.launch",
    "ranks": "run.ranks",
    "seed": "run.seed",
    "lora": "model.lora.rank",
    "profile": "run.profile_steps",
}
"""The key that each option of every command that trains sets."""

DATASET_KEYS: Mapping[str, str] = {
    **RUN_KEYS,
    "data": "data.train",
    "eval_data": "data.eval",
    "eval_fraction": "data.eval_fraction",
    "max_length": "data.max_length",
    "steps": "training.steps",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "micro_batch_rows": "training.micro_batch_rows",
}
"""The key that each option of a command that trains on a dataset sets."""


def in_order(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add options as they stand here, the first one first."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


model_option = click.option("--model", required=True, metavar="MODEL", help="A Hugging Face directory or hub id.")


def _profiled_steps(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Return the number of steps of `steps=3`."""
    name, _, count = (text or "").partition("=")
    if text is not None and (name.strip() != "steps" or not count.strip().isdecimal()):
        raise click.BadParameter(f"{text!r} is not of the form steps=STEPS, such as steps=3.")
    return None if text is None else int(count)


run_options = in_order(
    click.option("--micro-batch-rows", type=int, metavar="ROWS", help="Rows a rank computes at once."),
    click.option("--learning-rate", type=float, metavar="RATE", help="Peak learning rate of AdamW."),
    click.option("--output", metavar="DIRECTORY", help="The run directory; without it, a new one under runs/."),
    click.option("--launch", metavar="HOW", help="inline (this process) or ray."),
    click.option("--ranks", type=int, metavar="RANKS", help="Processes that train together; more than one needs --launch ray."),
    click.option("--seed", type=int, metavar="SEED", help="Seed of every random number."),
    click.option(
        "--lora",
        type=int,
        metavar="RANK",
        help="Train low-rank adapters of this rank, of all linear layers, instead of all weights; other keys are those of model.lora.",
    ),
    click.option(
        "--profile",
        metavar="steps=STEPS",
        callback=_profiled_steps,
        help="Record so many steps on every rank with torch's profiler, from the second one on, into profile/ of the run directory.",
    ),
)


def _columns(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, str] | None:
    """Return the data's own names by ours, None where the option is not given."""
    pairs = [text.partition("=") for text in texts]
    for text, (ours, equals, theirs) in zip(texts, pairs, strict=True):
        if not (ours.strip() and equals and theirs.strip()):
            raise click.BadParameter(f"{text!r} is not of the form OURS=THEIRS, such as prompt=question.")
        if sum(other[0].strip() == ours.strip() for other in pairs) > 1:
            raise click.BadParameter(f"{ours.strip()} is given twice.")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs} or None


map_option = click.option(
    "--map",
    "columns",
    multiple=True,
    callback=_columns,
    metavar="OURS=THEIRS",
    help="The data's own name of a column: prompt=question reads its column question as prompt. Give it again for more.",
)


def columns_by_key(columns: Mapping[str, str] | None) -> "dict[str, Option]":
    """Return the names that --map gives, by the keys of `[data.map]` that they set."""
    from skyrl_engine.config import Option

    return {f"data.map.{ours}": Option("--map", theirs) for ours, theirs in (columns or {}).items()}


def dataset_options(data: str, batch_size: str, *more: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add the options of a command that trains a model on a dataset, `more` among them.

    `data` and `batch_size` are what help says of these two.
    """
    repeated = f"{data}: a file, a folder or a hub id. Give it again for more, read one after the other."
    return in_order(
        model_option,
        click.option("--data", required=True, multiple=True, callback=one_or_several, metavar="DATA", help=repeated),
        map_option,
        click.option("--eval-data", metavar="DATA", help="Held-out data."),
        click.option("--eval-fraction", type=float, metavar="SHARE", help="Share of the data to hold out instead."),
        click.option("--max-length", type=int, metavar="TOKENS", help="Longest sample."),
        *more,
        click.option("--steps", type=int, metavar="STEPS", help="Optimizer steps."),
        click.option("--epochs", type=float, metavar="EPOCHS", help="Passes over the data instead of steps."),
        click.option("--batch-size", type=int, metavar="SAMPLES", help=batch_size),
        run_options,
    )


def values_by_key(keys: Mapping[str, str], options: Mapping[str, Any]) -> "dict[str, Option]":
    """Return the options that were given, by the keys that `keys` says they set."""
    from skyrl_engine.config import Option

    return {key: Option(f"--{name.replace('_', '-')}", options[name]) for name, key in keys.items() if options[name] is not None}


def select_given_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the running command's options, None for those that nobody gave: a key=value wins over a default."""
    source = click.get_current_context().get_parameter_source
    return {name: None if source(name) is ParameterSource.DEFAULT else value for name, value in values.items()}


def refuse_unread(raw: "RawConfig", remedy: Callable[[str], str | None]) -> None:
    """Raise ConfigError with every key of the command line that the running command does not read: those that `remedy` answers.

    Keys of a file are not refused: it may be the file of a run, of which the command reads a part.
    """
    from skyrl_engine.errors import ConfigError

    if problems := _find_unread(raw, remedy):
        raise ConfigError([*raw.problems, *problems])


def resolve_read(raw: "RawConfig", remedy: Callable[[str], str | None]) -> "ResolvedConfig":
    """Resolve a configuration, and refuse what `refuse_unread` does together with every other mistake of it.

    A key that is wrong in another way too is refused once, for that. Raises ConfigError, and what `config.resolve` does.
    """
    from skyrl_engine.config import resolve
    from skyrl_engine.errors import ConfigError, EngineError

    unread = _find_unread(raw, remedy)
    try:
        resolved = resolve(raw)
    except ConfigError as error:
        known = {problem.where for problem in error.problems}
        raise ConfigError([*error.problems, *(mistake for mistake in unread if mistake.where not in known)]) from error
    except EngineError as error:
        if unread:
            raise ConfigError(unread) from error
        raise
    if unread:
        raise ConfigError(unread)
    return resolved


def _find_unread(raw: "RawConfig", remedy: Callable[[str], str | None]) -> "list[Problem]":
    from skyrl_engine.errors import Problem

    name = click.get_current_context().info_name
    return [
        Problem(f"{origin}: {key}", f"is nothing that {name} reads", advice)
        for key, origin in raw.origins.items()
        if origin.kind == "command line" and (advice := remedy(key)) is not None
    ]


def table_of(key: str) -> str:
    """Return the top-level key that a dotted key begins with: of `environments[0].weight`, environments."""
    return key.partition(".")[0].partition("[")[0]


overrides_argument = key_values(OVERRIDES, "Any key of the configuration; the same as section.key=value.")


def file_argument(*, required: bool) -> Callable[[Function], Function]:
    return click.argument("file", type=click.Path(path_type=Path), required=required, metavar="CONFIG" if required else "[CONFIG]")


def one_or_several(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> str | list[str] | None:
    """Return the value of an option that may be repeated as a key takes it: one text, a list of them, or None where it is not given."""
    return None if not values else values[0] if len(values) == 1 else list(values)


def flags_of(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return plugin options by the keys of the configuration that they set."""
    return {f"{kind}.use": choices[kind] for kind in _kinds() if choices.get(kind) is not None}


trust_option = click.option(
    "--trust-code",
    is_flag=True,
    help="Run code outside of a run directory that its configuration names, whoever made the run. Only for code you have read.",
)


def load_config(
    file: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, Any] | None = None,
    *,
    trust_code: bool = False,
    part: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
) -> "RawConfig":
    """Read a configuration; where the file may be left out, an override in its position counts as an override.

    `trust_code` is what `--trust-code` says; `part` is as for `config.load`.
    """
    from skyrl_engine.config import load

    consent = consent_of(trust_code=trust_code)
    if file is not None and "=" in str(file) and not file.exists():
        return load(None, (str(file), *overrides), flags or {}, consent=consent)
    return load(file, overrides, flags or {}, consent=consent, part=part)


def consent_of(*, trust_code: bool) -> "Consent":
    """Return the caller's word on code: what `--trust-code` says, or the answer of who sits at the terminal."""
    from skyrl_engine.config.trust.consent import Consent

    return Consent(is_given=trust_code, ask=_ask if sys.stdin.isatty() and sys.stderr.isatty() else None)


def _ask(lines: Sequence[str]) -> bool:
    """Show on stderr what would run, and ask whether it may."""
    for line in lines:
        echo(line, err=True)
    return click.confirm("It would be run with all your rights. Do you trust it?", default=False, err=True)
