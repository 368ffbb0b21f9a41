"""Every example in a Markdown file is a test; and how Hypothesis runs here.

Python blocks run, and what a `>>>` line shows is compared. TOML blocks are checked as configurations, with the options of the plugins they
name. In shell blocks, the engine's commands are parsed with all their options, and nox sessions and distributions must exist.
"""

import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import settings
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from skyrl_engine.cli.app import app
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.config.structure import structure
from skyrl_engine.testing import Conformance

# Reports cost seconds at the end of every run: tests of reports ask for them.
os.environ.setdefault("SKYRL_ENGINE_REPORT", "0")

# A busy machine is no failure. For `.ci/run` the same examples every time, so that a red run is about the change; elsewhere new ones.
settings.register_profile("here", deadline=None, max_examples=25)
# At night twenty times as many.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "here"))

# Runs of tests are signed with a key of the tests' own.
os.environ["SKYRL_ENGINE_KEY_FILE"] = str(Path(tempfile.mkdtemp(prefix="skyrl-engine-tests-")) / "run-key")

pytest_plugins = ("ranks_of_tests", "ranks_first", "seconds_per_file", "costly_tests", "unchanged_sources")

ROOT = Path(__file__).parent


PROMISES_BY_NIGHT = {"compiled", "adapter_sets", "offloads"}
"""Promises of backends that cost as much as all others together, whose code has tests of its own that run by day."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if issubclass(getattr(item, "cls", None) or object, Conformance):
        item.add_marker("conformance")
        callspec: Any = getattr(item, "callspec", None)
        if callspec is not None and callspec.params["promise"].name in PROMISES_BY_NIGHT:
            item.add_marker("nightly")
    if item.get_closest_marker("gpu") is not None and not _has_device():
        item.add_marker(pytest.mark.skip(reason="NOT PROVED HERE: this needs a CUDA device, and there is none"))


@cache
def _has_device() -> bool:
    import torch  # noqa: PLC0415 - for tests of devices alone

    return torch.cuda.is_available()


OF_THE_READER = ("./my_", "acme-losses")
"""An example may name the reader's own file or distribution, although it is not there."""


def check_toml(example: Example) -> None:
    """The whole text must be a configuration, apart from what it may leave out; project metadata must only be TOML."""
    table = tomllib.loads(example.parsed)
    if {"project", "build-system"} & table.keys():
        return
    raw = from_dict(table, f"{example.path}:{example.line}")
    if any(name in example.parsed for name in OF_THE_READER):
        assert not structure(raw, need=()).problems
    else:
        resolve(raw, need=())


def check_shell(example: Example) -> None:
    """Look at what each line calls; nothing is executed."""
    for line in example.parsed.replace("\\\n", " ").splitlines():
        for words in commands_of(line):
            if words[:1] == ["skyrl-engine"]:
                parse(words[1:])
            elif "nox" in words[:1]:
                unknown = set(sessions_of(words)) - set(re.findall(r"@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
                assert not unknown, f"noxfile.py has no session {sorted(unknown)}"
            elif words[:2] == ["pip", "install"]:
                wanted = {re.sub(r"\[.*", "", word) for word in words[2:] if word.startswith("skyrl-engine")}
                assert wanted <= distributions(), f"there is no distribution {sorted(wanted - distributions())}"


def commands_of(line: str) -> list[list[str]]:
    """The commands that `&&` joins on one line, as words; comments dropped."""
    commands: list[list[str]] = [[]]
    for word in shlex.split(line, comments=True):
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def parse(arguments: Sequence[str]) -> None:
    """Parse one command line of the engine as click would, down to the last option; raises click's errors."""
    command: click.Command | None = app
    context: click.Context | None = None
    rest = list(arguments)
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context)
        while rest and rest[0].startswith("-"):
            rest.pop(0)
        _, command, rest = command.resolve_command(context, rest)
    assert command is not None
    try:
        command.make_context(command.name, list(rest), parent=context)
    except click.BadParameter as error:
        if "does not exist" not in error.message:  # files of examples are the reader's
            raise


def sessions_of(words: Sequence[str]) -> list[str]:
    own = words[: words.index("--")] if "--" in words else words
    return [word for word in own[1:] if not word.startswith("-")]


def distributions() -> set[str]:
    projects = [ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")]
    return {tomllib.loads(project.read_text())["project"]["name"] for project in projects}


_FOLDER = "__folder__"


def into_a_folder(namespace: dict[str, Any]) -> None:
    """Run the examples of a page in a folder of their own: some write files."""
    folder = tempfile.TemporaryDirectory()
    namespace[_FOLDER] = folder, Path.cwd()
    os.chdir(folder.name)


def out_of_the_folder(namespace: dict[str, Any]) -> None:
    folder, before = namespace[_FOLDER]
    os.chdir(before)
    folder.cleanup()


examples = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser("toml", check_toml),
        CodeBlockParser("sh", check_shell),
        SkipParser(),
    ],
    patterns=["*.md"],
    setup=into_a_folder,
    teardown=out_of_the_folder,
)
pytest_collect_file = examples.pytest()
