"""`skyrl-engine doctor`: this machine and what is installed on it, with a remedy for every finding."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.terminal import echo, echo_json

if TYPE_CHECKING:
    from skyrl_engine.doctor.finding import DoctorFinding

FOUND = 1
"""Exit code: something does not work."""
_REPORT = "skyrl-engine-doctor.md"


@click.command(cls=EngineCommand)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    is_flag=False,
    flag_value=_REPORT,
    metavar="[FILE]",
    help=f"Write what was found for a bug report, without secrets; by default {_REPORT} here.",
)
@click.option(
    "--run", type=click.Path(path_type=Path), metavar="RUN", help="A run directory whose facts and last words the report holds too."
)
@click.option("--self-test/--no-self-test", default=True, help="Compute a gradient on one rank and on two, by default.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def doctor(report: Path | None, run: Path | None, *, self_test: bool, as_json: bool) -> int:
    """Examine this machine and what is installed on it: what does not work, what may fail, and one remedy for each.

    It ends with code 1 where something does not work. Every installed plugin is imported.
    """
    from skyrl_engine.doctor.bug_report import write_bug_report
    from skyrl_engine.doctor.examine import PARTS, SELF_TEST
    from skyrl_engine.doctor.finding import list_findings
    from skyrl_engine.report.run_facts import read_run

    if run is not None and report is None:
        raise click.UsageError("--run says what --report holds too; add --report.")
    facts = None if run is None else read_run(run)
    findings: list[DoctorFinding] = []
    for part in (*PARTS, *((SELF_TEST,) if self_test else ())):
        found = list_findings(part)
        findings += found
        if not as_json:
            _show(found)
    if report is not None:
        write_bug_report(findings, report, facts)
    counts = {state: sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if as_json:
        import attrs

        echo_json(
            {
                "findings": [attrs.asdict(finding) for finding in findings],
                "problems": counts["problem"],
                "warnings": counts["warning"],
            }
        )
    else:
        echo(f"\n{counts['problem']} problems, {counts['warning']} warnings.{'' if report is None else f' Written: {report}'}")
    return FOUND if counts["problem"] else 0


def _show(found: "Sequence[DoctorFinding]") -> None:
    """Print findings; with --quiet those alone that have a remedy."""
    from skyrl_engine.cli.render import show_doctor_finding

    for finding in found:
        if finding.state != "ok" or not current_settings().quiet:
            show_doctor_finding(finding)
