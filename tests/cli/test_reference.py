"""The command line reference in the documentation is the one the commands write."""

from pathlib import Path

from skyrl_engine.cli.reference import command_line_reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == command_line_reference(), (
        "write again: python -c 'from skyrl_engine.cli.reference import *; print(command_line_reference(), end=\"\")' > docs/reference/cli.md"
    )


def test_it_names_every_option_of_run():
    text = command_line_reference()
    run = text[text.index("### skyrl-engine run") : text.index("### skyrl-engine sft")]
    for option in ("--collator", "--loss", "--reducer", "--backend", "--merger", "--dry-run", "section.key=value"):
        assert option in run
