"""`skyrl-engine`: the table of commands, and the exit codes they end with.

Exit codes: 0 done, 1 a proof failed, 2 the command line or the configuration is wrong, 3 a plugin cannot be used, 4 anything else
failed, 130 interrupted.
"""

import gc
import os
import sys
from collections.abc import Sequence

import click

from skyrl_engine import __version__
from skyrl_engine.cli.command import CommandSettings
from skyrl_engine.cli.lazy import LazyCommand, LazyGroup
from skyrl_engine.cli.lost_terminal import outlive_terminals

PROGRAM = "skyrl-engine"
_COMPLETION = "_SKYRL_ENGINE_COMPLETE"

COMMANDS = {
    "demo": LazyCommand(
        "skyrl_engine.cli.demo.command:demo", "Fine-tune a small model on this CPU, offline, and see what it learned."
    ),
    "init": LazyCommand("skyrl_engine.cli.init:init", "Write a first configuration file, by a few questions or options."),
    "run": LazyCommand("skyrl_engine.cli.run:run", "Train as a configuration file says."),
    "plan": LazyCommand("skyrl_engine.cli.plan:plan", "Say what a run would do, and what each rank would hold, without a GPU."),
    "lock": LazyCommand("skyrl_engine.cli.lock:lock", "Write down which plugins a configuration uses, for `run --locked`."),
    "sft": LazyCommand("skyrl_engine.cli.sft:sft", "Fine-tune a model on a dataset without a configuration file."),
    "preference": LazyCommand(
        "skyrl_engine.cli.preference:preference", "Train a model on chosen and rejected answers (also: dpo)."
    ),
    "reward-model": LazyCommand(
        "skyrl_engine.cli.reward_model:reward_model", "Train a model to value answers, on chosen and rejected ones."
    ),
    "distill": LazyCommand(
        "skyrl_engine.cli.distill:distill", "Teach a model what a larger one knows, on its own samples or on rows."
    ),
    "rl": LazyCommand("skyrl_engine.cli.rl:rl", "Train a model by reinforcement, on tasks and rewards of your own."),
    "prove": LazyCommand(
        "skyrl_engine.cli.prove:prove", "Prove on this machine that gradients do not depend on how a batch is cut."
    ),
    "diff-backends": LazyCommand(
        "skyrl_engine.cli.diff_backends:diff_backends", "Run one batch through two backends and compare them."
    ),
    "doctor": LazyCommand(
        "skyrl_engine.cli.doctor:doctor", "Examine this machine and what is installed on it, with a remedy for every finding."
    ),
    "plugins": LazyCommand(
        "skyrl_engine.cli.plugins:plugins", "List installed plugins, show, verify and write one; catalogues of plugins."
    ),
    "config": LazyCommand("skyrl_engine.cli.config:config", "Show, check and describe configurations."),
    "data": LazyCommand("skyrl_engine.cli.data:data", "Look at data as the trainer will see it."),
    "env": LazyCommand("skyrl_engine.cli.env:env", "List environments, show one, answer one of its tasks by hand."),
    "rollouts": LazyCommand(
        "skyrl_engine.cli.rollouts:rollouts", "Look at the attempts of a run by reinforcement, compare steps, export them."
    ),
    "runs": LazyCommand(
        "skyrl_engine.cli.runs:runs", "List runs, show one, compare some, watch one, free what they take on the disk."
    ),
    "report": LazyCommand("skyrl_engine.cli.report:report", "Write a run, or several beside each other, as a page to look at."),
    "chat": LazyCommand("skyrl_engine.cli.chat:chat", "Talk to a model, a run or a checkpoint, or to two of them."),
    "compare-objectives": LazyCommand(
        "skyrl_engine.cli.compare_objectives:compare_objectives", "Compute a recorded step's batch under several losses."
    ),
    "evaluate": LazyCommand("skyrl_engine.cli.evaluate:evaluate", "Attempt tasks with a model, and say how often it is right."),
    "push": LazyCommand("skyrl_engine.cli.push:push", "Push a run's model to the Hugging Face hub, with a card."),
    "export": LazyCommand("skyrl_engine.cli.export:export", "Write a checkpoint as a Hugging Face directory."),
}

_ENVIRONMENT = {
    # no library under the engine reports home
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_QUIET_LIBRARIES = {
    # the engine shows its own progress, and one plain line where something fails
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


ALIASES = {"dpo": "preference"}
"""Other names of commands, which no list shows."""


@click.group(PROGRAM, cls=LazyGroup, table=COMMANDS, aliases=ALIASES, context_settings={"max_content_width": 100})
@click.version_option(__version__, "--version", prog_name=PROGRAM, message="%(prog)s %(version)s")
def app() -> None:
    """Post-training of language models out of plugins chosen by name.

    Start with `skyrl-engine demo`, or `skyrl-engine sft --model DIRECTORY --data FILE`.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (None: this process's) and return the exit code; what went wrong is printed to stderr."""
    _open_missing_streams()
    outlive_terminals()
    os.environ.update(_ENVIRONMENT)
    for name, value in _QUIET_LIBRARIES.items():
        os.environ.setdefault(name, value)
    settings = CommandSettings(owns_process=arguments is None)
    try:
        return _invoke(list(sys.argv[1:] if arguments is None else arguments), settings)
    except BaseException as error:  # noqa: BLE001 - every way to end is turned into an exit code; SystemExit keeps its own
        from skyrl_engine.cli.failures import exit_code_of

        return exit_code_of(error, settings)
    finally:
        if settings.owns_process:
            # the interpreter, as it ends, looks through all that is collected, several times; the system takes the memory back without that
            gc.freeze()


def _open_missing_streams() -> None:
    """Open stdout and stderr where a process was started without them, so that the next files it opens do not take their places."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _invoke(arguments: list[str], settings: CommandSettings) -> int:
    """Run the command and return its exit code (None: 0). `click.Command.main` would end a broken pipe of any kind silently."""
    if _COMPLETION in os.environ:
        app.main(arguments, PROGRAM, _COMPLETION)
    try:
        with app.make_context(PROGRAM, arguments, obj=settings) as context:
            result = app.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return result if isinstance(result, int) else 0
