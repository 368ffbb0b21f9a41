"""The example that `plugins new` writes for each kind that has one, in addition to its texts in templates/."""

from typing import cast

from attrs import frozen

from skyrl_engine import UnsupportedError
from skyrl_engine.registry.kinds import Kind, import_object

TORCH = "torch>=2.10"


@frozen
class Scaffold:
    """`description` is one line about the example; `runtime` what it needs besides the engine; `use` chooses it, after `run CONFIG`."""

    description: str
    use: tuple[str, ...]
    runtime: str | None = None


LOSS = Scaffold(
    "Generalised cross-entropy, a loss that forgives wrong labels, for skyrl-engine", ("--loss", "${name}", "loss.q=0.5"), TORCH
)
CORRECTION = Scaffold(
    "A correction for skyrl-engine that drops tokens the model finds hopeless", ('loss.corrections=[{ use = "${name}" }]',), TORCH
)
REDUCER = Scaffold("A reducer for skyrl-engine between the mean over tokens and the mean over sequences", ("--reducer", "${name}"))
ADVANTAGE = Scaffold(
    "An advantage for skyrl-engine: the best trajectories of a group against the others", ("--advantage", "${name}")
)
GROUP_FILTER = Scaffold(
    "A group filter for skyrl-engine that drops groups of which most attempts were cut off",
    ('group_filters=[{ use = "${name}" }]',),
)
ENVIRONMENT = Scaffold(
    "An environment for skyrl-engine: letters to count, with a second try", ('environments=[{ use = "${name}" }]',)
)
GENERATOR = Scaffold(
    "A generator for skyrl-engine that samples from any causal language model, plainly",
    ("--generator", "${name}", "generator.rows=8"),
    TORCH,
)
MERGER = Scaffold("A merger for skyrl-engine that restores the caller's order of samples", ("--merger", "${name}"))
COLLATOR = Scaffold("A collator for skyrl-engine: one sample per row, widths rounded up", ("--collator", "${name}"), TORCH)
OBSERVER = Scaffold(
    "An observer for skyrl-engine that writes steps into a CSV file", ('run.observers=["metrics_jsonl", "${name}"]',)
)


def scaffold_of(kind: Kind) -> Scaffold:
    """Return the scaffold of a kind. Raises UnsupportedError for a kind that takes more than a few lines."""
    if kind.scaffold is None:
        raise UnsupportedError(
            f"there is no template for {kind.with_article}: {kind.no_scaffold}", remedy=f"Start from {kind.start_from}"
        )
    return cast("Scaffold", import_object(kind.scaffold))
