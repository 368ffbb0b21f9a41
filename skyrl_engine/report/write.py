"""Writing of a report: facts, pictures and passages put into one page that holds all it needs."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from attrs import evolve

from skyrl_engine import __version__
from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.report.charts import OTHERS, Chart, ChartGroup, bounds_of, list_charts
from skyrl_engine.report.figures import Line, Picture, draw_lines, draw_stack
from skyrl_engine.report.run_facts import RunFacts
from skyrl_engine.report.series import Series, list_names
from skyrl_engine.report.shaded import show_attempts, show_samples
from skyrl_engine.report.tables import Table, label_runs, list_differences, list_facts
from skyrl_engine.run.durable import write_durably
from skyrl_engine.run.manifest import now

GENERATOR = f"skyrl-engine {__version__}"
_MARK = '<meta name="generator" content="skyrl-engine '
_LIBRARY_MARK = "and Bokeh Contributors"
_PAGE = Path(__file__).parent / "page"


def write_report(run: RunFacts, path: Path, *, script: Path | None = None) -> None:
    """Write what there is to see of one run. With `script`, the library that draws is written into that file, which the page loads and
    which many pages may share; without it, the page holds the library. Raises ConfigError for a file that is no report, or no library, and
    EngineError for one that cannot be written.
    """
    if run.trainer == "rl":
        content, title = show_attempts(run), "Attempts"
        tells = (
            "The best, the median and the worst attempt of a step, by reward. Blue over a straight line: positive advantage; orange over a "
            "wavy line: negative; the stronger, the larger. A line below: the gap between sampler and trainer, thin from 1e-4 nats, thick from "
            "1e-2, double from 0.1."
        )
    else:
        content, title = show_samples(run), "Samples"
        tells = (
            "The first samples of the first mini-batch. Underlined tokens carry loss, the more the thicker; the others are context."
        )
    shown_part = {"id": "shown", "title": title, "tells": tells, "content": content}
    _write(path, [run], script, title=run.name, facts=list_facts(run), differences=(), shown=shown_part)


def write_comparison(runs: Sequence[RunFacts], path: Path, *, script: Path | None = None) -> None:
    """Write what differs between runs, and their curves over each other. Raises as `write_report`."""
    title = "Comparison of " + ", ".join(label_runs(runs))
    _write(path, runs, script, title=title, facts=(), differences=list_differences(runs), shown=None)


def _draw_sections(runs: Sequence[RunFacts], labels: Sequence[str]) -> list[tuple[ChartGroup, list[Picture]]]:
    steps, spans, evaluations = (
        list_names(getattr(run.metrics, source) for run in runs) for source in ("steps", "spans", "evaluations")
    )
    drawn = []
    for section in list_charts(steps, spans, evaluations):
        pictures = [picture for chart in section.charts for picture in _draw(chart, runs, labels)]
        drawn.append((section, pictures))
    return drawn


def _draw(chart: Chart, runs: Sequence[RunFacts], labels: Sequence[str]) -> list[Picture]:
    """Return one picture of a chart for one run; for several, one for each metric, or for each run where it is a stack."""
    tables = [getattr(run.metrics, chart.source) for run in runs]
    names = chart.choose(list_names(tables))
    if chart.kind == "stack":
        pictures = []
        for label, table in zip(labels, tables, strict=True):
            parts = {name.removeprefix("time/"): table[name] for name in names if name in table}
            if parts:
                pictures.append(draw_stack(_entitle(chart, label if len(runs) > 1 else None), parts))
        return pictures
    if len(runs) == 1:
        lines = [_make_line(chart, name, name, runs[0]) for name in names]
        if chart.beside is not None and chart.beside in runs[0].metrics.evaluations:
            lines.append(Line("on held-out data", runs[0].metrics.evaluations[chart.beside], marks=True))
        return [draw_lines(chart, lines)]
    return [
        draw_lines(
            _entitle(chart, name if len(names) > 1 else None),
            [_make_line(chart, name, label, run) for label, run, table in zip(labels, runs, tables, strict=True) if name in table],
        )
        for name in names
    ]


def _make_line(chart: Chart, name: str, label: str, run: RunFacts) -> Line:
    table: Mapping[str, Series] = getattr(run.metrics, chart.source)
    band = None
    ends = chart.band if chart.band is not None and name == chart.metrics[0] else bounds_of(name)
    if all(each in table for each in ends):
        band = (table[ends[0]], table[ends[1]])
    return Line(label, table[name], band, marks=chart.source == "evaluations")


def _entitle(chart: Chart, label: str | None) -> Chart:
    return chart if label is None else evolve(chart, title=f"{chart.title}: {label}")


def _write(
    path: Path,
    runs: Sequence[RunFacts],
    script: Path | None,
    *,
    title: str,
    facts: Sequence[Table],
    differences: Sequence[Table],
    shown: dict[str, Any] | None,
) -> None:
    from bokeh.document import Document
    from bokeh.embed import components
    from markupsafe import Markup

    labels = label_runs(runs)
    drawn = _draw_sections(runs, labels)
    models = [picture.model for _, pictures in drawn for picture in pictures]
    document = Document()
    with document.models.freeze():  # else the models of all pictures are collected once more for each of them
        for model in models:
            document.add_root(model)
    drawing, divs = components(models) if models else ("", ())
    divided = iter(divs)
    sections = [
        {
            "id": f"section-{number}",
            "title": section.title,
            "folded": section.title == OTHERS,
            "pictures": [
                {
                    "title": picture.chart.title,
                    "unit": picture.chart.unit,
                    "tells": picture.chart.tells,
                    "summary": picture.summary,
                    "columns": picture.columns,
                    "rows": picture.rows,
                    "shortened": picture.shortened,
                    "div": Markup(next(divided)),  # noqa: S704 -- Bokeh's own
                }
                for picture in pictures
            ],
        }
        for number, (section, pictures) in enumerate(drawn)
    ]
    contents = [("differences", "What differs")] * bool(differences) + [("facts", "What it was")] * bool(facts)
    contents += [(f"section-{number}", section.title) for number, (section, _) in enumerate(drawn)]
    contents += [(str(shown["id"]), str(shown["title"]))] if shown else []
    text = _template()(
        title=title,
        generator=GENERATOR,
        written=now(),
        runs=[
            {
                "label": label,
                "trainer": run.trainer,
                "state": run.describe_state(),
                "duration": _format_seconds(run.seconds),
                "tokens": f"{run.tokens:,}",
            }
            for label, run in zip(labels, runs, strict=True)
        ],
        contents=contents,
        facts=facts,
        differences=differences,
        sections=sections,
        shown=shown,
        css=Markup((_PAGE / "report.css").read_text()),  # noqa: S704 -- our own
        javascript=Markup((_PAGE / "report.js").read_text()),  # noqa: S704 -- our own
        script=Markup(drawing),  # noqa: S704 -- Bokeh's own
        library=Markup(_library()),  # noqa: S704 -- Bokeh's own
        library_file=None if script is None else _link(script, path),
    )
    _refuse_foreign(path, _MARK, "report of this engine", "--output")
    if script is not None:
        _refuse_foreign(script, _LIBRARY_MARK, "script of Bokeh", "--script")
        _write_file(script, _library(), "--script")
    _write_file(path, text, "--output")


def _link(script: Path, page: Path) -> str:
    """Return the address of the script as the page asks for it: relative, so that both can be moved together."""
    return quote(Path(os.path.relpath(script.resolve(), page.resolve().parent)).as_posix())


def _write_file(path: Path, text: str, option: str) -> None:
    try:
        write_durably(path, text)
    except OSError as error:
        raise EngineError(f"{path} cannot be written ({error})", remedy=f"Free space there, or name another {option}") from error


def _refuse_foreign(path: Path, mark: str, kind: str, option: str) -> None:
    """Raise ConfigError where something would be overwritten that does not hold the mark of its kind near its beginning."""
    if path.is_dir():
        raise ConfigError([Problem(str(path), "is a folder", f"Name a file with {option}")])
    if path.is_file():
        with path.open("rb") as file:
            if mark.encode() not in file.read(4096):
                raise ConfigError([Problem(str(path), f"is there, and no {kind}", f"Name another file with {option}")])


def _format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


@cache
def _template() -> Callable[..., str]:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_PAGE / "report.html.in").read_text()).render


@cache
def _library() -> str:
    """Return the script of Bokeh as its wheel has it."""
    import bokeh

    return (Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js").read_text()
