"""`skyrl-engine report`: a run, or several beside each other, as a page to look at."""

from pathlib import Path

import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.terminal import echo

_COMPARISON = "comparison.html"


@click.command(cls=EngineCommand)
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"The file to write. By default report.html in the run directory; {_COMPARISON} here for several runs.",
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the library that draws into FILE, 1.3 MB, and let the page load it from there: for many pages in one place.",
)
def report(runs: tuple[Path, ...], output: Path | None, script: Path | None) -> None:
    """Write what there is to see of the run directory RUN into one file that a browser opens from disk.

    Of several runs, it shows what differs between them, and their curves over each other.
    """
    from skyrl_engine.report.run_facts import read_run
    from skyrl_engine.report.write import write_comparison, write_report

    facts = [read_run(run) for run in runs]
    if len(facts) == 1:
        path = facts[0].directory.report if output is None else output
        write_report(facts[0], path, script=script)
    else:
        path = Path(_COMPARISON) if output is None else output
        write_comparison(facts, path, script=script)
    echo(str(path))
