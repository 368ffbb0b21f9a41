"""Write the text of `docs/reference/cli.md` from the commands themselves."""

from collections.abc import Iterator

import click

from skyrl_engine.cli.app import PROGRAM, app
from skyrl_engine.cli.command import EngineCommand, common_options, every_command

_INTRODUCTION = """\
# Command line reference

<!-- Written by `skyrl_engine.cli.reference.command_line_reference()`; change the commands, not this page. -->

Every command takes `--debug` (show the traceback of a failure), `--quiet` (print results and errors only) and `--help`. Results go to
stdout, progress and errors to stderr. On a terminal progress is drawn live; into a pipe or a file it is plain lines.

A command that fails ends in one line that says what went wrong and what to do; where there are details, they stand above it.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | `prove` found that a promise does not hold, or that a planted mistake goes unnoticed |
| 2 | the command line or the configuration is wrong |
| 3 | a plugin cannot be used: missing, ambiguous, blocked, incompatible or broken |
| 4 | anything else failed: data, model, a rank, a checkpoint, the machine |
| 130 | interrupted; a run ends after the step it is in, and a second Ctrl-C ends it at once |

Nothing is reported to anybody: the engine has no telemetry, and switches off that of the libraries under it.
"""


def command_line_reference() -> str:
    """Return the page: every command with its usage, its text, its arguments and options."""
    parts = [_INTRODUCTION]
    for path, command in every_command(app, (PROGRAM,)):
        context = click.Context(command, info_name=" ".join(path))
        usage = " ".join([*path, *command.collect_usage_pieces(context)])
        parts.append(f"\n{'#' * (len(path) + 1)} {' '.join(path)}\n\n```text\n{usage}\n```\n\n{_text(command)}\n")
        rows = list(_options(command, context))
        if rows:
            parts.append("\n".join(["", "| option | meaning |", "|---|---|", *rows, ""]))
    return "".join(parts)


def _text(command: click.Command) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n"))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    common = {"--help", *(name for option in common_options() for name in option.opts)}
    if isinstance(command, EngineCommand):
        command.explain_options()
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and isinstance(parameter, click.Option) and not common.intersection(parameter.opts):
            names, meaning = (text.replace("|", "\\|") for text in record)
            yield f"| `{names}` | {' '.join(meaning.split())} |"
