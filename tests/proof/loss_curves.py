"""One training, run on all backends: thirty steps of AdamW over the same batches, and a drawing of the losses and how far they are apart.

    python tests/proof/loss_curves.py docs/reference/backend-parity.svg

Drawn here because a plotting library is no dependency of the project.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from parity import Matrix, resolve_plugins

from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.proof.rollouts import make_rollouts

Curves = Mapping[str, npt.NDArray[np.float64]]

STEPS, BATCHES = 30, 4
"""Four batches again and again, so that there is something to learn although their tokens are random."""

RUNS = {
    "fsdp, one rank": ("fsdp", "dp1"),
    "fsdp, tp 2 x dp 2": ("fsdp", "tp2xdp2"),
    "deepspeed z3, dp 2": ("deepspeed z3", "dp2"),
    "megatron, tp 2 x pp 2": ("megatron", "tp2xpp2"),
    "megatron, cp 2": ("megatron", "cp2"),
}
"""The first is what the others are compared with."""

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0, schedule="cosine", warmup_steps=3)

TOLERANCE = 1e-5
"""Relative to the loss, at every step. Losses are sums of a few hundred float32 terms, and agree to about 1e-6.

A curve alone would not show a gradient with a wrong factor, which AdamW divides out again; that is what the table of gradients is for. It
shows what a table of two steps cannot: that nothing wears off over many, such as moments, weight decay, clipping and the schedule.
"""


def measure(matrix: Matrix) -> Curves:
    """The loss before every step, float64[steps], by the names of RUNS."""
    curves = {}
    plugins = resolve_plugins("cross_entropy", "packed")
    for name, (backend, layout) in RUNS.items():
        with matrix.group(backend, layout, OPTIMIZER) as group:
            engine = matrix.engine(group, plugins, OPTIMIZER, STEPS)
            needs = engine.assembly.objective.columns
            plans = [engine.plan(make_rollouts(needs, seed)) for seed in range(BATCHES)]
            steps = (engine.train(plans[step % BATCHES]) for step in range(STEPS))
            curves[name] = np.array([step.metrics["loss"].result for step in steps])
    return curves


def differences(curves: Curves) -> Curves:
    """|loss - loss of the first run| / loss of the first run, by the names of all others."""
    first, *others = curves
    return {name: np.abs(curves[name] - curves[first]) / curves[first] for name in others}


def disagreements(curves: Curves) -> list[str]:
    """Names of the runs that are further from the first one than the tolerance allows."""
    return [name for name, difference in differences(curves).items() if not difference.max() <= TOLERANCE]


WIDTH, HEIGHT, LEFT, TOP, GAP = 720, 200, 60, 30, 50
APART = (-9, -5)
"""Powers of ten in the lower panel."""

COLOURS = ("#1b1b1b", "#d55e00", "#0072b2", "#009e73", "#cc79a7")
"""Told apart by colour-blind readers too (Okabe and Ito 2008), after black."""


def draw(curves: Curves) -> str:
    """An SVG of two panels over the steps: losses, and their differences from the first run's on a logarithmic scale."""
    apart = {name: np.log10(np.maximum(value, 10.0 ** APART[0])) for name, value in differences(curves).items()}
    losses = np.stack(list(curves.values()))
    span = (math.floor(losses.min()), math.ceil(losses.max()))
    second = TOP + HEIGHT + GAP
    below = second + HEIGHT
    colours = dict(zip(curves, COLOURS, strict=True))
    parts = [
        _axes(TOP, "loss", {value: str(value) for value in range(span[0], span[1] + 1)}, span),
        _axes(
            second, "relative difference from the first", {value: f"1e{value}" for value in range(APART[0], APART[1] + 1)}, APART
        ),
        *(_line(curve, TOP, span, colours[name], width=7 - 1.4 * number) for number, (name, curve) in enumerate(curves.items())),
        *(_line(curve, second, APART, colours[name], width=2) for name, curve in apart.items()),
        *(_text(LEFT + step * (WIDTH / (STEPS - 1)), below + 18, str(step + 1), "middle") for step in (0, 9, 19, 29)),
        _text(LEFT + WIDTH / 2, below + 36, "step", "middle"),
        *_legend(colours, below + 56),
    ]
    size = f'viewBox="0 0 {LEFT + WIDTH + 20} {below + 84}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _axes(top: float, title: str, marks: Mapping[int, str], span: tuple[float, float]) -> str:
    lines = [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff" stroke="#888888"/>',
        _text(LEFT, top - 8, title, "start"),
    ]
    for value, label in marks.items():
        place = _height(value, top, span)
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{place:.1f}" y2="{place:.1f}" stroke="#dddddd"/>')
        lines.append(_text(LEFT - 6, place + 4, label, "end"))
    return "\n".join(lines)


def _line(values: npt.NDArray[np.float64], top: float, span: tuple[float, float], colour: str, *, width: float) -> str:
    """Lines on top of each other stay visible where later ones are thinner."""
    step = WIDTH / (STEPS - 1)
    points = " ".join(f"{LEFT + number * step:.1f},{_height(value, top, span):.1f}" for number, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width:.1f}" stroke-linejoin="round"/>'


def _height(value: float, top: float, span: tuple[float, float]) -> float:
    low, high = span
    return top + HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))


def _legend(colours: Mapping[str, str], top: float) -> Sequence[str]:
    places = [LEFT + number * (WIDTH / len(colours)) for number in range(len(colours))]
    return [
        f'<rect x="{place:.1f}" y="{top - 9}" width="12" height="10" fill="{colour}"/>\n'
        + _text(place + 16, top, name, "start", 11)
        for place, (name, colour) in zip(places, colours.items(), strict=True)
    ]


def _text(x: float, y: float, words: str, anchor: str, size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#444444">{words}</text>'


def main(target: str) -> None:
    """Run everything and draw it. Ends with an error where the runs do not agree."""
    with Matrix() as matrix:
        curves = measure(matrix)
    for name, difference in differences(curves).items():
        print(f"{name}: at most {difference.max():.1e} from {next(iter(RUNS))}", flush=True)
    if wrong := disagreements(curves):
        sys.exit(f"not drawn: {', '.join(wrong)}")
    Path(target).write_text(draw(curves))


if __name__ == "__main__":
    main(sys.argv[1])
