"""Pictures of charts, by Bokeh: curves of one run or of several, and areas upon each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure

from skyrl_engine.report.charts import Chart
from skyrl_engine.report.series import Curve, Series, shorten

COLORS = ("#1f83d6", "#d9660a", "#1a9e77", "#c95fa5", "#8f6ad8", "#8a8f00", "#c0453b", "#5f7a8c")
"""Colours that stand off a white and a nearly black page."""
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
HATCHES = (" ", "/", ".", "x", "-", "|", "+", "o")
"""Lines differ by their dashes too, and areas by their hatches, so that a report is readable without colour."""
HEIGHT = 240


@frozen(eq=False)
class Line:
    """A series with its label, and the extremes that are drawn behind it where there are any."""

    label: str
    series: Series
    band: tuple[Series, Series] | None = None
    marks: bool = False
    """Draw its points, as evaluations are few."""


@frozen(eq=False)
class Picture:
    """A figure of Bokeh with what it shows in words and in numbers, for who does not see it."""

    chart: Chart
    model: Any
    summary: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Rows of at most `_ROWS` steps: the step, and a number or nothing for each line."""

    shortened: int
    """Steps that one point stands for; 1: every step has its own."""


def draw_lines(chart: Chart, lines: Sequence[Line]) -> Picture:
    """Draw series as lines of one picture."""
    plot = _new_figure(chart)
    curves = [shorten(line.series) for line in lines]
    for place, (line, curve) in enumerate(zip(lines, curves, strict=True)):
        color, dash = COLORS[place % len(COLORS)], DASHES[place % len(DASHES)]
        columns = {"step": curve.steps, "value": curve.values}
        banded = line.band is not None or curve.width > 1
        if banded:
            columns["low"], columns["high"] = _band_of(line, curve)
        source = _pack_columns(columns)
        if banded:
            _drop_states(plot.varea("step", "low", "high", source=source, fill_color=color, fill_alpha=0.15))
        legend = {} if len(lines) == 1 else {"legend_label": line.label}
        drawn = plot.line("step", "value", source=source, line_color=color, line_dash=dash, line_width=2, **legend)
        _drop_states(drawn)
        if line.marks or len(curve.steps) == 1:
            marker = ("circle", "square", "triangle", "diamond")[place % 4]
            _drop_states(plot.scatter("step", "value", source=source, color=color, size=7, marker=marker))
        tips = [("step", "@step{0,0}"), (line.label, "@value{0.[000000]}" if _is_plain(curve) else "@value{0.000e+0}")]
        plot.add_tools(HoverTool(renderers=[drawn], mode="vline", tooltips=tips))
    plot.y_range.default_span = 0.5 * max(float(np.abs(curve.values).max()) for curve in curves) or 1.0  # around a constant
    _place_legend(plot, len(lines))
    return _describe(chart, plot, [line.label for line in lines], curves)


def draw_stack(chart: Chart, parts: Mapping[str, Series]) -> Picture:
    """Draw series of the same steps as areas upon each other, the largest at the bottom."""
    plot = _new_figure(chart)
    steps = np.unique(np.concatenate([series.steps for series in parts.values()]))
    filled = {name: Series(steps, _fill(series, steps)) for name, series in parts.items()}
    order = sorted(filled, key=lambda name: -float(filled[name].values.sum()))
    curves = [shorten(filled[name]) for name in order]
    columns = {"step": curves[0].steps, "top0": np.zeros(len(curves[0].steps))}
    for place, curve in enumerate(curves):
        columns |= {f"value{place}": curve.values, f"top{place + 1}": columns[f"top{place}"] + curve.values}
    source = _pack_columns(columns)
    for place, name in enumerate(order):
        color = COLORS[place % len(COLORS)]
        drawn = plot.varea(
            "step",
            f"top{place}",
            f"top{place + 1}",
            source=source,
            fill_color=color,
            fill_alpha=0.7,
            legend_label=name,
            hatch_pattern=HATCHES[place % len(HATCHES)],
            hatch_alpha=0.35,
            hatch_scale=10,
        )
        edge = plot.line("step", f"top{place + 1}", source=source, line_color=color, line_width=1)
        tips = [("step", "@step{0,0}"), (name, f"@value{place}{{0.[000000]}}")]
        plot.add_tools(HoverTool(renderers=[edge], mode="vline", tooltips=tips))
        drawn.level = "underlay"
        _drop_states(drawn)
        _drop_states(edge)
    _place_legend(plot, len(order))
    return _describe(chart, plot, order, curves)


def _pack_columns(columns: Mapping[str, Any]) -> ColumnDataSource:
    """Return the columns of a picture as float32, which is finer than a screen, where its range allows that."""
    packed = {}
    for name, values in columns.items():
        fits = float(np.abs(values).max(initial=0.0)) < np.finfo(np.float32).max
        packed[name] = np.asarray(values, np.float32 if fits else np.float64)
    return ColumnDataSource(packed)


def _drop_states(drawn: Any) -> None:
    """Leave out how a line looks when it is selected or muted, which no line of ours ever is."""
    drawn.nonselection_glyph = drawn.muted_glyph = None


def _new_figure(chart: Chart) -> Any:
    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_axis_label="step",
        y_axis_label=chart.unit or None,
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_scroll=None,
        toolbar_location="above",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0.3,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.min_border_left = 56
    return plot


def _place_legend(plot: Any, lines: int) -> None:
    """Put the legend below the picture, where it hides nothing; a click hides a line."""
    if lines > 1 and plot.legend:
        legend = plot.legend[0]
        legend.click_policy = "hide"
        legend.orientation = "horizontal"
        legend.nrows = -(-lines // 3) if lines > 3 else 1
        legend.background_fill_alpha = 0
        legend.border_line_alpha = 0
        plot.height = HEIGHT + 24 * int(legend.nrows)
        plot.add_layout(legend, "below")


def _band_of(line: Line, curve: Curve) -> tuple[Any, Any]:
    """Return the lowest and highest value at each point of the curve: those of the band where it has the same steps, else its own."""
    if line.band is not None and all(np.array_equal(each.steps, line.series.steps) for each in line.band):
        low, high = (shorten(each) for each in line.band)
        return low.lowest, high.highest
    return curve.lowest, curve.highest


def _fill(series: Series, steps: Any) -> Any:
    """Return the values at these steps, 0 where the series has none."""
    values = np.zeros(len(steps))
    values[np.searchsorted(steps, series.steps)] = series.values
    return values


def _is_plain(curve: Curve) -> bool:
    """Return True where six decimals show the values."""
    largest = float(np.abs(curve.values).max(initial=0.0))
    return largest == 0 or 1e-3 <= largest < 1e9


_ROWS = 12


def _describe(chart: Chart, plot: Any, labels: Sequence[str], curves: Sequence[Curve]) -> Picture:
    """Say what a picture shows: first, last, lowest and highest of each line, and a table of a few steps."""
    parts = [
        f"{label} from {curve.values[0]:.4g} at step {curve.steps[0]:,.0f} to {curve.values[-1]:.4g} at step {curve.steps[-1]:,.0f}, "
        f"lowest {curve.lowest.min():.4g}, highest {curve.highest.max():.4g}"
        for label, curve in zip(labels, curves, strict=True)
    ]
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(_ROWS, len(steps))).astype(int))]
    rows = []
    for step in chosen:
        cells = [curve.values[curve.steps == step] for curve in curves]
        rows.append((f"{step:,.0f}", *(f"{cell[0]:.5g}" if len(cell) else "" for cell in cells)))
    return Picture(
        chart, plot, f"{chart.title}: {'; '.join(parts)}.", ("step", *labels), tuple(rows), max(curve.width for curve in curves)
    )
