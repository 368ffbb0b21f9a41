"""What a new plugin of each kind is made of, beside the texts in templates/."""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

from skyrl_engine import UnsupportedError
from skyrl_engine.registry.kinds import KINDS

TORCH = "torch>=2.6"


@frozen
class Recipe:
    """`description` is one line about the example; `runtime` what it needs besides the engine; `use` chooses it, after `run CONFIG`."""

    description: str
    use: tuple[str, ...]
    runtime: str | None = None


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "loss": Recipe(
            "Generalised cross-entropy, a loss that forgives wrong labels, for skyrl-engine",
            ("--loss", "${name}", "loss.q=0.5"),
            runtime=TORCH,
        ),
        "correction": Recipe(
            "A correction for skyrl-engine that drops tokens the model finds hopeless",
            ('loss.corrections=[{ use = "${name}" }]',),
            runtime=TORCH,
        ),
        "reducer": Recipe(
            "A reducer for skyrl-engine between the mean over tokens and the mean over sequences", ("--reducer", "${name}")
        ),
        "merger": Recipe("A merger for skyrl-engine that restores the caller's order of samples", ("--merger", "${name}")),
        "collator": Recipe(
            "A collator for skyrl-engine: one sample per row, widths rounded up", ("--collator", "${name}"), runtime=TORCH
        ),
        "observer": Recipe(
            "An observer for skyrl-engine that writes steps into a CSV file", ('run.observers=["metrics_jsonl", "${name}"]',)
        ),
    }
)


def recipe_of(kind: str) -> Recipe:
    """The recipe of a kind that has one. Raises UnsupportedError for a backend, which no few lines make."""
    assert kind in KINDS, f"there is no kind {kind!r}"
    if kind in RECIPES:
        return RECIPES[kind]
    raise UnsupportedError(
        f"there is no template for {KINDS[kind].with_article}: it holds a model, its parallel layout, its optimizer and its checkpoints, and "
        "a few generated lines of that would only look like one",
        remedy="Start from a copy of plugins/fsdp, which is small because skyrl_engine.modeling does what backends share",
    )
