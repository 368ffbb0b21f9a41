"""The parts of an objective: the main loss, the corrections of its values, and further terms, each with a coefficient."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from attrs import evolve, frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.correction import Correction
from skyrl_engine.contracts.kinds.loss import Loss
from skyrl_engine.contracts.kinds.needs import column_forms, model_score
from skyrl_engine.registry.bound_plugin import BoundPlugin

KINDS_OF_PARTS = frozenset(("loss", "correction"))


@frozen(eq=False)
class ObjectiveParts:
    """objective = sum over tokens of weight * (factor * main + sum over terms of coefficient * term); corrections make the factor."""

    main: BoundPlugin[Loss]
    terms: tuple[BoundPlugin[Loss], ...] = ()
    corrections: tuple[BoundPlugin[Correction], ...] = ()

    @classmethod
    def make(cls, plugins: Mapping[str, SelectedPlugin], context: FactoryContext) -> "ObjectiveParts":
        """Make the losses and corrections among the selected plugins, which come by their place in the configuration."""
        taken: set[str] = set()
        main: BoundPlugin[Loss] = _make_part(plugins["loss"], "loss", context, taken)
        terms: list[BoundPlugin[Loss]] = []
        corrections: list[BoundPlugin[Correction]] = []
        for place, selected in plugins.items():
            if selected.coefficient is not None:
                terms.append(_make_part(selected, place, context, taken))
            elif selected.loaded.record.kind == "correction":
                corrections.append(_make_part(selected, place, context, taken))
        return cls(main, tuple(terms), tuple(corrections))

    @property
    def losses(self) -> tuple[BoundPlugin[Loss], ...]:
        """The main loss and the terms."""
        return (self.main, *self.terms)

    @property
    def needs(self) -> Mapping[str, tuple[str, ...]]:
        """Model scores and data columns that each part reads, by the part's label."""
        parts: tuple[BoundPlugin[Any], ...] = (*self.losses, *self.corrections)
        return {part.label: tuple(part.product.needs) for part in parts}

    @property
    def scores(self) -> frozenset[str]:
        """Model scores that the parts read."""
        return frozenset(need for need in self._all_needs() if model_score(need))

    @property
    def reads(self) -> tuple[str, ...]:
        """Every need of the parts, each once: model scores, and columns in the form that they are read in."""
        return tuple(dict.fromkeys(self._all_needs()))

    @property
    def columns(self) -> tuple[str, ...]:
        """Data columns that the parts read, and those that hold token ids for their scores, each once."""
        return tuple(column_forms(self._all_needs()))

    def _all_needs(self) -> Iterator[str]:
        for needs in self.needs.values():
            yield from needs


def _make_part(selected: SelectedPlugin, place: str, context: FactoryContext, taken: set[str]) -> BoundPlugin[Any]:
    """The part at `place`, under a name that no part before it has: the plugin's own, with a number after it where that is taken."""
    part = selected.bind(place, context)
    candidates = (part.name if number == 1 else f"{part.name}_{number}" for number in count(1))
    free = next(candidate for candidate in candidates if candidate not in taken)
    taken.add(free)
    return evolve(part, name=free)
