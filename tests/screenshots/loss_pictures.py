"""Pictures of losses for docs/how-to/choose-a-loss.md, from the plugins themselves: `python tests/screenshots/loss_pictures.py`.

Each curve is the derivative of a loss by a token's log-probability, with the sign turned: by how much a step pushes the token up. Drawn here
because a plotting library is no dependency of the project.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from skyrl_engine.contracts import LossTokens, Sequences
from skyrl_engine.contracts.kinds.loss import Pairs
from skyrl_engine_losses import plugin as losses

INK: Mapping[str, Mapping[str, str]] = {
    "light": {"words": "#444444", "frame": "#888888", "lines": "#dddddd"},
    "dark": {"words": "#cccccc", "frame": "#777777", "lines": "#444444"},
}
"""Colours of a light and of a dark page, which shows through."""

Numbers = npt.NDArray[np.float64]

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
COLOURS = ("#9cc8f0", "#d9660a", "#1a9e77", "#c95fa5")
"""They are told apart on white and on black."""
DASHES = ("", "8 4", "3 3", "10 3 2 3")
"""Lines differ by both, and are readable without colour."""

RATIOS = np.linspace(0.0, 2.5, 501)[1:]
MARGINS = np.linspace(-4.0, 6.0, 501)
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 210, 46, 40, 56


@frozen(eq=False)
class Panel:
    """Curves over the same places, float64[n] each, with a line of title; `span` is what the axis shows."""

    title: str
    places: Numbers
    curves: Mapping[str, Numbers]
    span: tuple[float, float]
    marks: Sequence[float]
    below: str


def push_of_ratios(advantage: float) -> Mapping[str, Numbers]:
    """Return the push on one token, by the ratio of the policy to the old one, of losses whose bounds are near enough to be seen."""
    old = torch.full((len(RATIOS),), -3.0, dtype=torch.float64)
    columns = {"old_logprobs": old, "advantages": old * 0 + advantage}
    options: Mapping[str, Mapping[str, float]] = {"importance_sampling": {}, "ppo": {}, "cispo": {"clip_high": 1.0}, "sapo": {}}
    return {name: push(name, old + torch.from_numpy(np.log(RATIOS)), columns, **more) for name, more in options.items()}


def push_of_margins() -> Mapping[str, Numbers]:
    """Return the push on the chosen answer of a pair, by the margin of its reward, of forms of `dpo` with beta 1."""
    count = len(MARGINS)
    chosen = torch.stack([torch.from_numpy(MARGINS), torch.zeros(count, dtype=torch.float64)], 1).reshape(-1)
    reference = torch.zeros(2 * count, dtype=torch.float64)
    forms = ("sigmoid", "hinge", "ipo", "apo_zero")
    return {form: push("dpo", chosen, {"ref_logprobs": reference}, pairs=True, form=form, beta=1.0)[::2] for form in forms}


def push(name: str, logprobs: torch.Tensor, columns: Mapping[str, torch.Tensor], *, pairs: bool = False, **options: Any) -> Numbers:
    """Return minus the derivative of the loss by each log-probability, every token a sequence of its own."""
    plugin: Any = getattr(losses, name)
    schema = plugin.skyrl_engine_config_schema()
    loss = plugin.skyrl_engine_make_loss(config=None if schema is None else schema(**options))
    logprobs = logprobs.clone().requires_grad_()
    count = len(logprobs)
    ones, rows = torch.ones(count, dtype=torch.int64), torch.arange(count)
    roles = rows % 2 if pairs else None
    sequences = Sequences(rows, ones, rows // 2 if pairs else rows, rows, roles) if pairs else Sequences(rows, ones, rows, rows)
    tokens = LossTokens({"logprobs": logprobs, **columns}, sequences, torch.Generator, Pairs.of(sequences) if pairs else None)
    output = loss(tokens)
    values = getattr(output, "token_loss", output)
    # a loss of pairs has its value at each token, and the reducer takes the mean over both
    (values.sum() / (2 if pairs else 1)).backward()
    assert logprobs.grad is not None
    result: Numbers = -logprobs.grad.numpy()
    return result


def draw(panels: Sequence[Panel], title: str, page: str) -> str:
    """Return an SVG of panels beside each other for a "light" or a "dark" page."""
    ink = INK[page]
    names = list(panels[0].curves)
    total = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + 64
    parts = [f"<title>{title}</title>"]
    for number, panel in enumerate(panels):
        parts += _draw_panel(panel, LEFT + number * (WIDTH + GAP), ink)
    step = (total - LEFT) / len(names)
    for number, name in enumerate(names):
        place = LEFT + number * step
        parts.append(f'<path d="M{place:.0f} {height - 16}h26" {_stroke(number)}/>')
        parts.append(_write(place + 32, height - 12, name, "start", ink))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" role="img" font-family="sans-serif" font-size="13">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _draw_panel(panel: Panel, left: float, ink: Mapping[str, str]) -> list[str]:
    low, high = panel.span
    first, last = panel.places[0], panel.places[-1]

    def across(value: float) -> float:
        return left + WIDTH * (value - first) / (last - first)

    def down(value: float) -> float:
        return TOP + HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))

    parts = [
        _write(left, TOP - 14, panel.title, "start", ink),
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="{ink["frame"]}"/>',
    ]
    for value in range(math.ceil(low), math.floor(high) + 1):
        parts += [
            f'<path d="M{left} {down(value):.1f}h{WIDTH}" stroke="{ink["lines"]}"/>',
            _write(left - 6, down(value) + 4, str(value), "end", ink),
        ]
    for mark in panel.marks:
        parts.append(_write(across(mark), TOP + HEIGHT + 16, f"{mark:g}", "middle", ink))
    parts.append(_write(left + WIDTH / 2, TOP + HEIGHT + 32, panel.below, "middle", ink))
    for number, curve in enumerate(panel.curves.values()):  # the first, which others cover, is the broadest
        points = " ".join(
            f"{across(place):.1f},{down(value):.1f}"
            for place, value in zip(panel.places, curve, strict=True)
            if low <= value <= high
        )
        parts.append(f'<polyline points="{points}" {_stroke(number)}/>')
    return parts


def _stroke(number: int) -> str:
    dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
    return f'fill="none" stroke="{COLOURS[number]}" stroke-width="{4.5 if number == 0 else 2.2}"{dash}'


def _write(x: float, y: float, words: str, anchor: str, ink: Mapping[str, str]) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink["words"]}">{words}</text>'


def make_pictures() -> Mapping[str, str]:
    """Return the text of each picture by its file's name."""
    below, marks = "ratio of the policy to the old one", (0.5, 1.0, 1.5, 2.0, 2.5)
    ratios = [
        Panel("advantage +1: push up", RATIOS, push_of_ratios(1.0), (-0.2, 2.6), marks, below),
        Panel("advantage -1: push down", RATIOS, push_of_ratios(-1.0), (-2.6, 0.2), marks, below),
    ]
    margins = [Panel("push on the chosen answer", MARGINS, push_of_margins(), (-2.0, 4.2), (-4, -2, 0, 2, 4, 6), "margin")]
    drawn = {
        "losses-by-ratio": (ratios, "Push of policy-gradient losses on a token, by the ratio"),
        "losses-by-margin": (margins, "Push of forms of DPO on the chosen answer, by the margin"),
    }
    return {f"{name}-{page}.svg": draw(*picture, page) for name, picture in drawn.items() for page in INK}


if __name__ == "__main__":
    for name, text in make_pictures().items():
        (PICTURES / name).write_text(text, encoding="utf-8")
        print(PICTURES / name)
