"""What an objective is made of: the main loss, the corrections of its values, and further terms, each with a coefficient."""

from collections.abc import Iterator, Mapping
from itertools import count

from attrs import frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.correction import Correction
from skyrl_engine.contracts.kinds.loss import MODEL_SCORES, Loss


@frozen(eq=False)
class Term:
    """A loss and how much it counts. `name` is under which its metrics appear, `label` names it in errors."""

    name: str
    label: str
    loss: Loss
    coefficient: float = 1.0


@frozen(eq=False)
class CorrectionStep:
    """A correction; `name` and `label` as of a term."""

    name: str
    label: str
    correction: Correction


@frozen(eq=False)
class ObjectiveParts:
    """objective = sum over tokens of weight * (factor * main + sum over terms of coefficient * term); corrections make the factor."""

    main: Term
    terms: tuple[Term, ...] = ()
    corrections: tuple[CorrectionStep, ...] = ()

    @classmethod
    def made(cls, plugins: Mapping[str, SelectedPlugin], context: FactoryContext) -> "ObjectiveParts":
        """Of the selected plugins by their place in the configuration: `loss`, `loss.terms[0]`, `loss.corrections[0]` and on."""
        main = plugins["loss"]
        terms = [selected for place, selected in plugins.items() if place.startswith("loss.terms[")]
        corrections = [selected for place, selected in plugins.items() if place.startswith("loss.corrections[")]
        taken = {main.loaded.record.name}
        return cls(
            Term(main.loaded.record.name, str(main.loaded.record), main.make(context)),
            tuple(
                Term(_free(term.loaded.record.name, taken), str(term.loaded.record), term.make(context), _coefficient(term))
                for term in terms
            ),
            tuple(
                CorrectionStep(_free(step.loaded.record.name, taken), str(step.loaded.record), step.make(context))
                for step in corrections
            ),
        )

    @property
    def losses(self) -> tuple[Term, ...]:
        """The main loss and the terms."""
        return (self.main, *self.terms)

    @property
    def needs(self) -> Mapping[str, tuple[str, ...]]:
        """What each part reads, by its label: model scores and data columns."""
        return {
            **{term.label: tuple(term.loss.needs) for term in self.losses},
            **{step.label: tuple(step.correction.needs) for step in self.corrections},
        }

    @property
    def scores(self) -> frozenset[str]:
        """Model scores that the parts read."""
        return frozenset(self._all_needs()) & frozenset(MODEL_SCORES)

    @property
    def columns(self) -> tuple[str, ...]:
        """Data columns that the parts read, each once."""
        return tuple(dict.fromkeys(need for need in self._all_needs() if need not in MODEL_SCORES))

    def _all_needs(self) -> Iterator[str]:
        for needs in self.needs.values():
            yield from needs


def _coefficient(term: SelectedPlugin) -> float:
    assert term.coefficient is not None, f"the term {term.loaded.record} has no coefficient"
    return term.coefficient


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number behind it where another part has it."""
    candidates = (name if number == 1 else f"{name}_{number}" for number in count(1))
    free = next(candidate for candidate in candidates if candidate not in taken)
    taken.add(free)
    return free
