"""Every recipe on every backend in every layout, measured or refused in planning's words, as a page; ends with an error at a hole.

    python tests/proof/recipe_parity.py docs/reference/recipe-parity.md

The backends, the layouts and the words of a refusal are those of parity.py, which measures losses and forms of rows the same way.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from parity import BACKENDS, LAYOUTS
from recipe_cells import GRADIENT, LOGPROBS, LOSS, WEIGHTS, RecipeEntry, RecipeMatrix
from recipes import RECIPES

from skyrl_engine.proof.layouts import ParallelSizes

Kind = Literal["measured", "refused"]
Place = tuple[str, str, str]
"""A recipe, a backend and a layout."""

PRODUCT: Sequence[Place] = [(recipe, backend, layout) for backend in BACKENDS for layout in LAYOUTS for recipe in RECIPES]


def write_page(entries: Sequence[RecipeEntry]) -> str:
    """Return the page of the reference: a row per backend and layout, then every sentence of a refusal once, by its number."""
    by_place = {(entry.recipe, entry.backend, entry.layout): entry for entry in entries}
    sentences = list(dict.fromkeys(entry.refused for entry in entries if entry.refused))
    lines = [
        f"| backend | layout | {' | '.join(RECIPES)} | loss | weights | log-probability |",
        f"|---|---|{'---|' * (len(RECIPES) + 3)}",
    ]
    for backend in BACKENDS:
        for layout in LAYOUTS:
            row = [by_place[recipe, backend, layout] for recipe in RECIPES]
            shown = " | ".join(_show(entry, sentences) for entry in row)
            cells = [entry.cell for entry in row if entry.cell is not None]
            columns = ([cell.loss for cell in cells], [cell.weights for cell in cells], [cell.logprobs for cell in cells])
            worst = " | ".join(f"{max(values):.1e}" if values else "" for values in columns)
            lines.append(f"| {backend} | {ParallelSizes.parse(layout)} | {shown} | {worst} |")
    table, refusals = "\n".join(lines), "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed", "megatron-core"))
    return f"""# Recipe parity

Every recipe on every backend in every layout. Each cell is a real configuration that was planned as `--dry-run` plans it. Where planning
took it, two steps ran on processes of their own in float32, and the number is the largest ||g - g'|| / ||g'|| of any parameter's gradient g,
g' that of one process in float64 (`fsdp` on one rank). Where planning refused it, the number in brackets is that of the sentence below.
Written by `nox -s parity`; `nox -s nightly` holds every cell, and an empty one fails. [Backend parity](backend-parity.md) has more losses and
forms of rows.

Limits: gradient {GRADIENT:.0e}; *loss*, relative, {LOSS:.0e}; *weights* after each step, of the worst parameter and relative to it,
{WEIGHTS:.0e}; *log-probability*, in nats, {LOGPROBS:.0e}. The last three columns are the worst of their row. Steps are plain SGD after
clipping, because a step of AdamW hides a wrong factor. Models: a tied two-layer Qwen3 with norms and matrices far from their first values,
and a four-layer Qwen3-VL.

- *rl*, *rl + reference* and *ppo + critic* train on recorded rollouts, whose old policy, reference, values and advantages this layout scores.
- *distill* has the teacher on the ranks; *distill rows* reads a teacher's likeliest tokens from the rows.
- *generation* samples before, between and after the two steps: tokens are the same, and their log-probabilities stand with the others.
- *staged* takes both steps in one call, whose shards are placed before the first: it shows next weights in the place of gradients.

{table}

Refused while planning, in these words:

{refusals}

Measured with {versions}, on CPU over gloo; not proven here: CUDA.
"""


def read_kinds(page: str) -> Mapping[Place, Kind]:
    """Return what a written page says of every cell. A cell that says neither is left out."""
    kinds: dict[Place, Kind] = {}
    layouts = {str(ParallelSizes.parse(layout)): layout for layout in LAYOUTS}
    for line in page.splitlines():
        backend, layout, *cells = [part.strip() for part in line.strip("|").split("|")] if line.startswith("| ") else ["", ""]
        if backend not in BACKENDS or layout not in layouts:
            continue
        for recipe, cell in zip(RECIPES, cells, strict=False):
            if cell:
                kinds[recipe, backend, layouts[layout]] = "refused" if cell.startswith("[") else "measured"
    return kinds


def _show(entry: RecipeEntry, sentences: Sequence[str]) -> str:
    if entry.cell is None:
        return f"[{sentences.index(entry.refused) + 1}]" if entry.refused else ""
    return f"{entry.cell.weights if entry.cell.gradient is None else entry.cell.gradient:.1e}"


def collect_entries(matrix: RecipeMatrix) -> Iterator[RecipeEntry]:
    """Fill every cell of the product, telling how it went."""
    for place in PRODUCT:
        entry = matrix.entry(*place)
        print(f"{entry.name}: {entry.problem or entry.refused or entry.cell}", flush=True)
        yield entry


def main(target: str) -> None:
    """Fill every cell and write the page. Ends with an error where a cell does not hold, or is empty."""
    with RecipeMatrix() as matrix:
        entries = list(collect_entries(matrix))
    wrong = [f"{entry.name}: {entry.problem}" for entry in entries if entry.problem]
    if wrong:
        sys.exit("not written:\n" + "\n".join(wrong))
    Path(target).write_text(write_page(entries))


if __name__ == "__main__":
    main(sys.argv[1])
