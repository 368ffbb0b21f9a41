"""Every option that takes a value says its default, or that it must be given, and shows an example that the option takes."""

import click
import pytest

from skyrl_engine.cli.app import PROGRAM, app
from skyrl_engine.cli.command import EngineCommand, every_command
from skyrl_engine.cli.option_help import EXAMPLES, OF_COMMAND

COMMANDS = {" ".join(path[1:]): command for path, command in every_command(app, (PROGRAM,)) if isinstance(command, EngineCommand)}


def list_valued(command):
    return [option for option in command.params if isinstance(option, click.Option) and not option.is_flag]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_says_its_default_and_an_example(name):
    command = COMMANDS[name].explain_options()
    context = click.Context(command, info_name=command.name)
    for option in list_valued(command):
        _, help_text = option.get_help_record(context)
        spelled = max(option.opts, key=len)
        assert option.required or "[default:" in help_text or "; default" in help_text, (name, spelled, help_text)
        assert help_text.count(f"Example: {spelled} ") == 1, (name, spelled, help_text)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_one_that_the_option_takes(name):
    command = COMMANDS[name]
    context = click.Context(command, info_name=command.name)
    for option in list_valued(command):
        spelled = max(option.opts, key=len)
        option.type.convert(OF_COMMAND.get((command.name, spelled), EXAMPLES.get(spelled)), option, context)


def test_no_example_is_left_over():
    used = {max(option.opts, key=len) for command in COMMANDS.values() for option in list_valued(command)}
    assert EXAMPLES.keys() == used


@pytest.mark.parametrize(
    ("name", "option", "default"),
    [
        ("rl", "groups", "16"),
        ("rl", "preset", "grpo"),
        ("rl", "loss", "ppo"),
        ("sft", "loss", "cross_entropy"),
        ("sft", "batch_size", "32"),
    ],
)
def test_defaults_are_those_of_the_configuration(name, option, default):
    command = COMMANDS[name].explain_options()
    assert next(param for param in command.params if param.name == option).show_default == default
