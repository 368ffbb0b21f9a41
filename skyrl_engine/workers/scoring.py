"""Models that score and never learn, beside the one that is trained."""

from typing import Protocol, cast

from skyrl_engine.contracts.kinds.backend import Backend, Objective, RankBatch, SwitchesAdapters
from skyrl_engine.contracts.values.outputs import RankOutput


class ScoringModel(Protocol):
    """A model on this rank of which nothing is asked but scores; a backend that was set up without an optimizer is one."""

    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput: ...

    def close(self) -> None: ...


class WithoutAdapters:
    """The trained model with its adapters off."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score without gradients, with the base model alone."""
        with cast("SwitchesAdapters", self._backend).without_adapters():
            return self._backend.forward(batch, objective)

    def close(self) -> None:
        """Leave the backend to whom it belongs."""
