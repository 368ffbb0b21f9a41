"""An objective that keeps a model's hidden states, for another model to be compared with."""

from collections.abc import Mapping

from torch import Tensor

from skyrl_engine.contracts import MicroBatch, RankOutput
from skyrl_engine.modeling.teaching import HIDDEN_STATES


class KeptStates:
    """Keeps the states [n, h] of one micro-batch in `states`, which stays None on all stages but the last, and produces no output."""

    needs = frozenset({HIDDEN_STATES})
    temperature = 1.0
    states: Tensor | None = None

    def __call__(self, scores: Mapping[str, Tensor], micro_batch: MicroBatch) -> tuple[Tensor, RankOutput]:  # noqa: ARG002 - the protocol has it
        self.states = scores[HIDDEN_STATES].detach()
        return self.states.sum(), RankOutput.empty()
