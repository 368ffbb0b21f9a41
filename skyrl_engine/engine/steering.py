"""Coefficients of the objective's terms that follow what optimizer steps measure."""

from collections.abc import Mapping
from typing import Protocol

from skyrl_engine.contracts.values.outputs import Metric


class Steering(Protocol):
    """Coefficients of terms that change between optimizer steps; `Engine.train` asks for them before each and shows it its metrics after."""

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficients of the next step by the term's name in metrics, in the place of the configured ones."""

    def observe(self, metrics: Mapping[str, Metric]) -> None:
        """Take the metrics of a step's passes over all ranks, such as `policy/entropy` where it is watched."""
