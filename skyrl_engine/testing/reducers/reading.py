"""Columns and values of samples in the structures of a reducer that needs them: numbers, or texts where it answers texts."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.needs import ColumnForm, column_forms, sample_value
from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.subject import Subject, part_of
from skyrl_engine.workers.dispatch import token_weights

NUMBERS = (0, 1, 2)
TEXTS = ("math", "code", "math/easy")
"""Values of samples are one of these: few, so that some samples share theirs."""

Choices = Mapping[str, tuple[Any, ...]]


@frozen(eq=False)
class Reading:
    """The reading of a reducer beyond counts: its `needs`, and the choices for its values of samples, in each way that it answers."""

    needs: tuple[str, ...] = ()
    ways: tuple[Choices, ...] = ({},)

    def fill(self, structure: BatchStructure, seed: int = 0) -> BatchStructure:
        """Return the structure with what is needed; the seed decides the numbers, and which of the ways it is."""
        if not self.needs:
            return structure
        numbers, count = np.random.default_rng(seed), len(structure.loss_weight)
        choices = self.ways[seed % len(self.ways)]
        return evolve(
            structure,
            columns={name: _column(numbers, form, count) for name, form in column_forms(self.needs).items()},
            sample_values={
                name: np.asarray(values)[numbers.integers(0, len(values), len(structure))] for name, values in choices.items()
            },
        )


def _column(numbers: np.random.Generator, form: ColumnForm, count: int) -> AnyArray:
    shape = count if form == "number" else (count, 2)
    if form == "token ids":
        return numbers.integers(0, 50, shape)
    return (numbers.integers(-8, 9, shape) / 4).astype(np.float32)


def reading_of(subject: Subject[Any], plain: BatchStructure) -> Reading:
    """Return what the subject's reducer reads. Data hold texts or numbers under a name, and a reducer is written for one or for both: it is
    asked for weights of the plain structure with each. One that answers neither gets numbers.

    A suite's `sample_values` says the choices itself, by name.
    """
    needs = tuple(getattr(subject.make(), "needs", ()))
    names = _names(needs)
    declared = subject.hooks["sample_values"]() if "sample_values" in subject.hooks else {}
    choices = [[tuple(declared[name])] if name in declared else [NUMBERS, TEXTS] for name in names]
    ways = tuple(dict(zip(names, choice, strict=True)) for choice in product(*choices))
    accepted = tuple(way for way in ways if _answers(subject, Reading(needs, (way,)).fill(plain))) if len(ways) > 1 else ways
    return Reading(needs, accepted or ways[:1])


def _names(needs: Iterable[str]) -> list[str]:
    return [name for name in map(sample_value, needs) if name is not None]


def _answers(subject: Subject[Any], structure: BatchStructure) -> bool:
    with suppress(EngineError):
        token_weights(part_of(subject.make(), subject.label, "reducer"), structure)
        return True
    return False
