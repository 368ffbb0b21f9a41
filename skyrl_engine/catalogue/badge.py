"""The badge of a distribution: an SVG of two words that says what the catalogue knows of its newest wheel."""

from collections.abc import Mapping
from html import escape
from typing import Final

from skyrl_engine.catalogue.plugin_index import IndexedDistribution, Standing
from skyrl_engine.visible import visible_line

_COLOURS: Final[Mapping[Standing, str]] = {
    "verified": "#1a7f37",
    "partly verified": "#8a5a00",
    "not verified": "#57606a",
    "broken": "#b42318",
}
"""Each has a contrast of 4.5 or more with white text."""

_PER_CHARACTER, _PADDING, _HEIGHT = 6.7, 8, 20


def draw_badge(distribution: IndexedDistribution) -> str:
    """Return the badge as SVG, whose title says in words which wheel was verified, with which engine and when."""
    wheel = distribution.newest
    left, right = "skyrl-engine", f"{wheel.standing} {wheel.version}"
    widths = [round(len(text) * _PER_CHARACTER + 2 * _PADDING) for text in (left, right)]
    title = escape(
        visible_line(f"{distribution.name} {wheel.version}: {wheel.standing} with skyrl-engine {wheel.engine} on {wheel.date}")
    )
    texts = "".join(
        f'<text x="{x:g}" y="14" textLength="{width - 2 * _PADDING}">{escape(visible_line(text))}</text>'
        for text, width, x in zip((left, right), widths, (widths[0] / 2, widths[0] + widths[1] / 2), strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="{_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<rect width="{sum(widths)}" height="{_HEIGHT}" rx="3" fill="{_COLOURS[wheel.standing]}"/>'
        f'<path d="M3 0h{widths[0] - 3}v{_HEIGHT}H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#24292f"/>'
        f'<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" text-anchor="middle">{texts}</g></svg>\n'
    )
