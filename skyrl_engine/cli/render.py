"""Show results of commands to people. Only this module imports rich."""

import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen
from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.progress_bar import ProgressBar as Bar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from skyrl_engine.cli.progress import ProgressLines
from skyrl_engine.run.progress import Progress
from skyrl_engine.visible import visible, visible_line

if TYPE_CHECKING:
    from skyrl_engine.config.schema import KnownFormat
    from skyrl_engine.data.preview import Preview, SamplePreview
    from skyrl_engine.doctor.finding import DoctorFinding
    from skyrl_engine.proof.backends import BackendDifference
    from skyrl_engine.proof.prover import CaseResult
    from skyrl_engine.testing.promise import Finding, Verdict

_PIPE_WIDTH = 10_000
_HISTOGRAM_WIDTH = 40
_OPEN, _CLOSE = "«", "»"


class _PipedConsole(Console):
    """A console whose texts hold no control characters, whatever is printed: those of styles and of progress are rich's own.

    It lets a broken pipe reach `cli.failures`; rich would end the process with code 1.
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does, and make what comes from data visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(*, stderr: bool = False) -> Console:
    """Return a console on the current stream; output into a pipe or a file is never wrapped or coloured."""
    stream = sys.stderr if stderr else sys.stdout
    return _PipedConsole(
        file=stream, highlight=False, soft_wrap=not stream.isatty(), width=None if stream.isatty() else _PIPE_WIDTH
    )


def _print(table: Table) -> None:
    """Print a table on stdout; in a pipe or a file without the blanks that fill its last column."""
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.print(Text(line.rstrip()))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows of plain values under column names, on stdout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible_line(str(value))) for value in row))
    _print(table)


def show_facts(facts: Mapping[str, Any]) -> None:
    """Print one `name  value` line per fact, on stdout."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        # what a cell holds is measured, so it is made visible here
        table.add_row(Text(visible_line(name)), Text(visible(str(value))))
    _print(table)


def show_heading(text: str) -> None:
    """Print a heading, on stdout."""
    _console().print(Text(f"\n{visible_line(text)}"), style="bold")


def show_lines(lines: Sequence[str]) -> None:
    """Print indented lines, on stdout."""
    console = _console()
    for line in lines:
        console.print(Text(f"  {visible(line)}"))


_SEGMENTS = {"prompt": "dim", "sampled": "green", "observed": "yellow"}
"""Styles of stretches of a rollout, by what they are."""


def show_segments(segments: Sequence[tuple[str, str]]) -> None:
    """Print stretches of a rollout, each under its name and in its colour, on stdout."""
    console = _console()
    for name, text in segments:
        console.print(Text(f"--- {name}", style="bold"))
        console.print(Text(visible(text), style=_SEGMENTS[name]))


@contextmanager
def show_columns(names: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
    """Show texts that grow beside each other under their names, on a terminal's stdout. Yields what takes all texts so far."""
    from rich.live import Live

    def draw(texts: Sequence[str]) -> Table:
        table = Table.grid(expand=True, padding=(0, 2), pad_edge=False)
        for _ in names:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*(Text(visible_line(name), style="bold") for name in names))
        table.add_row(*(Text(visible(text)) for text in texts))
        return table

    with Live(draw([""] * len(names)), console=_console(), refresh_per_second=12) as live:
        yield lambda texts: live.update(draw(texts))


def show_verdict(label: str, options: Mapping[str, Any], verdict: "Verdict", *, every: bool) -> None:
    """Print the conformance kit's verdict on a plugin on stdout, what is broken first; `every`: also what is kept and what is not claimed."""
    console = _console()
    console.print(Text(visible_line(label), style="bold"))
    if options:
        console.print(Text(f"with {', '.join(f'{name} = {value!r}' for name, value in options.items())}", style="dim"))
    console.print()
    styles = {"kept": "green", "broken": "bold red", "undecided": "yellow", "not claimed": "dim"}
    broken = verdict.broken
    waiting = verdict.of_status("undecided") if broken else ()
    alike = _by_reason(finding for finding in broken if not finding.counterexample)
    for finding in (*broken, *(() if waiting else verdict.of_status("undecided"))):
        first, *others = alike.get(_reason(finding), [finding])
        if finding in others:
            continue
        head = (f"{finding.status:<13}", styles[finding.status])
        console.print(Text.assemble(head, (f"{finding.sentence} ({finding.promise})", "bold")))
        show_lines([f"  {line}" for line in finding.lines])
        if finding is first and others:
            show_lines([f"  So for {_format_promise_count(others)}."])
    if waiting:  # a broken promise is why others are undecided
        reasons = {_reason(finding) for finding in waiting}
        findings = [finding for finding in broken if _reason(finding) in reasons] or broken
        summary = f"{_format_promise_count(waiting)}; see {', '.join(finding.promise for finding in findings)}"
        console.print(Text.assemble((f"{'undecided':<13}", styles["undecided"]), (summary, "dim")))
    for finding in (*verdict.of_status("kept"), *verdict.of_status("not claimed")) if every else ():
        head = (f"{finding.status:<13}", styles[finding.status])
        console.print(Text.assemble(head, (": ".join(filter(None, (finding.sentence, finding.cause))), "dim")))
    counts = Counter(finding.status for finding in verdict.findings)
    if every or broken or verdict.of_status("undecided"):
        console.print()
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    console.print(Text.assemble((summary, "bold"), ("" if every else " (--all lists them)", "dim")))
    statuses = {finding.promise: finding.status for finding in verdict.findings}
    unchecked = {
        "whether its values are the right ones (no oracle)": statuses.get("oracle") == "not claimed",
        "larger batches than the kit's": "sample_order" in statuses,
    }
    if any(unchecked.values()):
        console.print(Text(f"not checked: {'; '.join(what for what, holds in unchecked.items() if holds)}", style="dim"))


def _reason(finding: "Finding") -> str:
    """Return the cause of a finding without its numbers: cases of other sizes say the same."""
    return re.sub(r"\d+", "n", (finding.cause or "").rpartition("cases could not be decided: ")[2])


def _by_reason(findings: "Iterable[Finding]") -> "dict[str, list[Finding]]":
    reasons: dict[str, list[Finding]] = {}
    for finding in findings:
        reasons.setdefault(_reason(finding), []).append(finding)
    return reasons


def _format_promise_count(findings: "Sequence[Finding]") -> str:
    """Return "2 more promises: one, other"."""
    return f"{len(findings)} more promise{'s' * (len(findings) > 1)}: {', '.join(finding.promise for finding in findings)}"


@frozen
class ProgressDisplay:
    """Listeners that show progress: `training` for a ProgressObserver, `data` for a label, rows done and rows in all (0: what cannot be
    counted), `warning` for a sentence that the user must not miss, `notice` for one that says what the run is about to do.
    """

    training: Callable[[Progress], None]
    data: Callable[[str, int, int], None]
    warning: Callable[[str], None]
    notice: Callable[[str], None]


@contextmanager
def show_progress(*, quiet: bool) -> Iterator[ProgressDisplay]:
    """Show progress on stderr: lines now and then, and on a terminal a bar that moves with every step and vanishes at the end."""
    console = _console(stderr=True)

    def warning(sentence: str) -> None:
        console.print(Text(f"warning: {visible(sentence)}"), soft_wrap=True)

    def notice(sentence: str) -> None:
        console.print(Text(visible(sentence)), soft_wrap=True)

    if quiet:
        yield ProgressDisplay(_ignore, _ignore, warning, _ignore)
    elif not console.is_terminal:
        yield ProgressDisplay(ProgressLines(console.print), partial(_say_uncounted, console), warning, notice)
    else:
        with ProgressBar(
            BarColumn(bar_width=30), TextColumn("{task.description}", markup=False), console=console, transient=True
        ) as bar:
            task = bar.add_task("getting ready", total=None)
            lines = ProgressLines(console.print)

            def training(progress: Progress) -> None:
                lines(progress)
                bar.update(task, total=progress.total_steps or None, completed=progress.step, description=str(progress))

            def data(label: str, done: int, total: int) -> None:
                description = f"{label}: {done:,} of {total:,}" if total else f"{label} ..."
                # what cannot be counted may keep this process so busy that the bar's own thread gets no turn
                bar.update(task, total=total or None, completed=done, description=description, refresh=not total)

            yield ProgressDisplay(training, data, warning, notice)


def _say_uncounted(console: Console, label: str, _done: int, total: int) -> None:
    """Print what takes a while and cannot be counted; what is counted moves on a terminal only."""
    if not total:
        console.print(f"{label} ...")


def _ignore(*_: object) -> None:
    pass


def format_kept_rows(kind: "KnownFormat", samples: int, rows: int) -> str:
    """Count samples and the rows that they were made of; a row of preferences is a pair."""
    from skyrl_engine.data.sources.formats import FORMATS

    return f"{samples // 2:,} pairs of {rows:,} rows" if FORMATS[kind].gives == "pair" else f"{samples:,} of {rows:,} rows"


def show_preview(preview: "Preview") -> None:
    """Print samples with their loss-carrying tokens marked, counts, and lengths as a histogram, on stdout."""
    console = _console()
    for sample in preview.samples:
        carrying = sum(token.loss for token in sample.tokens)
        console.print(
            Text(
                f"row {sample.row}{f', {sample.role}' if sample.role else ''}: {sample.length} tokens, {carrying} carry loss",
                style="bold",
            )
        )
        console.print(_mark_loss_tokens(sample, coloured=console.color_system is not None))
        console.print()
    if preview.samples:
        console.print(
            "tokens that carry loss are green" if console.color_system else f"{_OPEN}...{_CLOSE} carries loss", style="dim"
        )
        console.print()
    counts = preview.counts
    show_facts(
        {
            "dataset": f"{preview.name} ({preview.format})",
            "written": preview.written,
            "samples": format_kept_rows(preview.format, counts.samples, counts.rows),
            "dropped": f"{counts.dropped_overlong:,} over-long, {counts.dropped_without_loss:,} without a token that carries loss"
            + (f", {counts.dropped_bad_rows:,} rows that cannot be used" if counts.dropped_bad_rows else "")
            + (f", {counts.dropped_bad_images:,} with bad images" if counts.dropped_bad_images else "")
            + (f", {counts.dropped_with_unit:,} with another of their unit" if counts.dropped_with_unit else "")
            + (f", {counts.dropped_ties:,} with answers that are all rated alike" if counts.dropped_ties else "")
            + (f", {counts.dropped_equal:,} of pairs whose answers are equal once cut" if counts.dropped_equal else ""),
            "truncated": f"{counts.truncated:,}",
            **({"left out": f"{counts.excluded_turns:,} assistant turns, by their own weight"} if counts.excluded_turns else {}),
            "tokens": f"{counts.tokens:,}, of which {counts.loss_tokens:,} carry loss ({counts.loss_tokens / max(counts.tokens, 1):.1%})",
            "length": f"{preview.shortest} to {preview.longest} tokens, median {preview.median:g}",
            "padding": f"{preview.padding_share:.1%} in batches of {preview.batch_size}, "
            f"{preview.padding_share_sorted:.1%} if sorted by length",
            **({"images": f"{counts.images:,}, of {counts.image_tokens:,} tokens"} if counts.images else {}),
            **({} if preview.groups is None else {"groups": f"{preview.groups:,}"}),
            **{
                f"column {column.name}": f"{column.low:g} to {column.high:g}, mean {column.mean:g}"
                + (f" ({column.per_token} per token)" if column.per_token > 1 else "")
                for column in preview.columns
            },
        }
    )
    console.print()
    most = max((span.samples for span in preview.histogram), default=0)
    show_table(
        ("tokens", "samples", ""),
        [
            (_range(span.low, span.high), f"{span.samples:,}", "█" * -(-_HISTOGRAM_WIDTH * span.samples // max(most, 1)))
            for span in preview.histogram
        ],
    )


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} - {high}"


def _mark_loss_tokens(sample: "SamplePreview", *, coloured: bool) -> Text:
    """Return the sample's text with loss-carrying stretches in green or, without colours, between marks, and with visible line ends."""
    text = Text()
    for loss, tokens in itertools.groupby(sample.tokens, key=lambda token: token.loss):
        piece = visible("".join(token.text for token in tokens)).replace("\n", "⏎\n")
        if coloured:
            text.append(piece, style="green" if loss else "dim")
        else:
            text.append(f"{_OPEN}{piece}{_CLOSE}" if loss else piece)
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def show_proof_row(row: "CaseResult") -> None:
    """Print one cut of a proof on a line: a mark, its name, its distance from the reference, and the cause."""
    mark, style = ("ok", "green") if row.holds else ("differs", "yellow") if row.excuse else ("WRONG", "bold red")
    line = Text(f"{mark:8}", style=style)
    line.append(f"{row.case.name:47}", style="")
    if row.difference is not None:
        line.append(f"  loss {row.difference.loss:7.1e}  gradient {row.difference.gradient:7.1e}", style="")
    for reason in (row.explanation, row.excuse):
        if reason:
            line.append(f"  {reason}", style=style)
    _console().print(line)


def show_doctor_finding(finding: "DoctorFinding") -> None:
    """Print what was looked at on a line, how it is, and the remedy below it."""
    mark, style = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}[finding.state]
    line = Text(f"{mark:9}", style=style)
    line.append(f"{visible_line(finding.topic):26}  {visible_line(finding.found)}", style="")
    _console().print(line)
    if finding.remedy is not None:
        _console().print(Text(f"{'':11}{visible_line(finding.remedy)}", style=style))


_PARAMETERS_SHOWN = 8


def show_backend_difference(difference: "BackendDifference") -> None:
    """Print two backends side by side, the parameters that differ most, and the conclusion."""
    a, b = difference.a, difference.b
    factor = a.gradient_norm / b.gradient_norm if b.gradient_norm else float("nan")
    rows = [
        ("loss", f"{a.measured.loss:.8g}", f"{b.measured.loss:.8g}", f"{difference.loss:.1e} relative"),
        ("gradient norm", f"{a.gradient_norm:.8g}", f"{b.gradient_norm:.8g}", f"x{factor:.6f}"),
    ]
    rows += [
        (
            field.name,
            "",
            "",
            f"{field.largest:.1e} at most, at sample {field.sample}, token {field.token}" if field.largest else "none",
        )
        for field in difference.fields
    ]
    show_table(("", a.name, b.name, "difference"), rows)
    show_heading(f"gradients of {len(difference.parameters)} parameters, the most different first")
    show_table(
        ("parameter", "relative", "norm of the first", "norm of the second", "factor", "cosine"),
        [
            (
                gradient.name,
                f"{gradient.relative:.1e}",
                f"{gradient.norm_a:.4g}",
                f"{gradient.norm_b:.4g}",
                f"{gradient.factor:.6f}",
                f"{gradient.direction:.6f}",
            )
            for gradient in difference.worst[:_PARAMETERS_SHOWN]
        ],
    )
    for name, length in difference.untried.items():
        _console().print(
            f"not compared: the model changes at {length:,} tokens ({escape(name)}), and the rows are not on both sides of it",
            style="yellow",
        )
    for name, missing in (("first", difference.only_b), ("second", difference.only_a)):
        for parameter in missing:
            _console().print(f"the {name} backend has no gradient of {escape(parameter)}", style="red")
    _console().print(f"\n{escape(difference.explanation)}", style="green" if difference.agrees else "bold red")


@frozen
class Screen:
    """A run on one screen: `step` of `total` steps, `curves` as name, curve, last value and range, `passages` as heading and texts by kind."""

    title: str
    step: int
    total: int
    facts: Mapping[str, str]
    curves: Sequence[tuple[str, str, str, str]]
    passages: Sequence[tuple[str, Sequence[tuple[str, str]]]]


def show_screens(screens: Iterable[Screen]) -> None:
    """Show one screen after the other in their place, on a terminal; the last one stays."""
    console, shown = _console(), None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for screen in screens:
            shown = _lay_out(screen)
            live.update(shown, refresh=True)
    if shown is not None:
        console.print(shown)


def _lay_out(screen: Screen) -> Group:
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in screen.facts.items():
        facts.add_row(Text(name), Text(visible_line(value)))
    facts.add_row("", Bar(total=screen.total or 1, completed=screen.step, width=_HISTOGRAM_WIDTH))
    curves = Table(box=None, pad_edge=False, show_header=False)
    for style in ("bold", "cyan", "", "dim"):
        curves.add_column(style=style, no_wrap=True, overflow="ellipsis", justify="right" if not style else "left")
    for row in screen.curves:
        curves.add_row(*(Text(visible_line(cell)) for cell in row))
    attempts = [
        line
        for heading, texts in screen.passages
        for line in (
            Text(visible_line(heading), style="bold", no_wrap=True, overflow="ellipsis"),
            *(Text(f"  {visible_line(text)}", style=_SEGMENTS[kind], no_wrap=True, overflow="ellipsis") for kind, text in texts),
        )
    ]
    return Group(Text(visible_line(screen.title), style="bold reverse", no_wrap=True), facts, curves, *attempts)
