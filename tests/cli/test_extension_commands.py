"""Commands of other distributions: found in metadata, imported when called, and harmless where they are broken."""

import sys
from pathlib import Path
from typing import Any

import pytest

MODULE = """
import click

@click.command(help="Print a number.")
@click.option("--number", default=3)
def show(number):
    click.echo(f"number {number}")

no_command = 3
"""


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`offers(distribution, name=target, ...)` installs a distribution with these commands, summary and module `DISTRIBUTION.cli`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(distribution: str, *, source: str = MODULE, requires: str = "skyrl-engine>=0.3,<0.4", **commands: str) -> str:
        package = distribution.replace("-", "_")
        information = site / f"{package}-1.0.dist-info"
        information.mkdir()
        lines = (
            "Metadata-Version: 2.4",
            f"Name: {distribution}",
            "Version: 1.0",
            "Summary: Shows numbers",
            f"Requires-Dist: {requires}",
        )
        (information / "METADATA").write_text("\n".join(lines) + "\n")
        points = "\n".join(f"{name} = {package}.cli:{target}" for name, target in commands.items())
        (information / "entry_points.txt").write_text(f"[skyrl_engine.command]\n{points}\n")
        (site / package).mkdir()
        (site / package / "__init__.py").write_text("")
        (site / package / "cli.py").write_text(source)
        return f"{package}.cli"

    yield install
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def test_help_lists_it_with_the_summary_of_its_distribution_and_imports_nothing(command, offers):
    module = offers("acme-numbers", show="show")
    outcome = command("--help")
    assert outcome.code == 0
    assert "show" in outcome.out
    assert "Shows numbers (acme-numbers)" in " ".join(outcome.out.split())
    assert module not in sys.modules


@pytest.mark.parametrize("name", ["show", "acme-numbers:show"])
def test_it_is_imported_and_run_when_it_is_called(command, offers, name):
    module = offers("acme-numbers", show="show")
    outcome = command(name, "--number", "5", "--quiet")
    assert (outcome.code, outcome.out) == (0, "number 5\n"), outcome.err
    assert module in sys.modules


def test_one_of_two_distributions_is_named_in_full(command, offers):
    offers("acme-numbers", show="show")
    offers("acme-others", show="show", source=MODULE.replace("number {", "other {"))
    outcome = command("show")
    assert outcome.code == 3
    assert "Write acme-numbers:show or acme-others:show" in outcome.last_line
    assert command("acme-others:show").out == "other 3\n"
    assert "acme-numbers:show" in command("--help").out


def test_a_command_of_the_engine_is_never_replaced(command, offers):
    module = offers("acme-numbers", config="show")
    assert "number" not in command("config", "--help").out
    assert module not in sys.modules
    assert "Cannot be used" in command("--help").out
    outcome = command("acme-numbers:config")
    assert outcome.code == 3
    assert "is called like a command of the engine" in outcome.last_line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "import nowhere_at_all"}, "nowhere_at_all"),
        ({"requires": "skyrl-engine>=9"}, "is made for skyrl-engine >=9"),
        ({"show": "no_command"}, "is a int and no click command"),
        ({"show": "absent"}, "absent"),
    ],
    ids=["import", "engine", "no command", "no attribute"],
)
def test_a_broken_one_is_told_when_it_is_called_and_harms_nobody_else(command, offers, options, words):
    offers("acme-numbers", **{"show": "show", **options})
    assert command("plugins", "list").code == 0
    assert "show" in command("--help").out
    outcome = command("show")
    assert outcome.code == 3
    assert words in outcome.err
    assert "acme-numbers 1.0" in outcome.err


def test_a_distribution_that_cannot_be_read_hides_no_other(command, offers, tmp_path):
    offers("acme-numbers", show="show")
    (tmp_path / "site" / "acme_broken-1.0.dist-info").mkdir()
    (tmp_path / "site" / "acme_broken-1.0.dist-info" / "entry_points.txt").write_text("[skyrl_engine.command]\nx = y:z\n")
    assert command("show").out == "number 3\n"


def test_a_misspelt_name_is_answered_with_it(command, offers):
    offers("acme-numbers", show="show")
    assert "Did you mean 'show'?" in command("shwo").err
