"""Scores of the model alone: a pass that needs no loss and no data column."""

from collections.abc import Mapping

import torch
from attrs import field, frozen

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.outputs import collect
from skyrl_engine.spans import Spans


@frozen(eq=False)
class ScoreObjective:
    """Collects the model scores `needs` of every scored token; there is nothing to differentiate.

    Implements `contracts.Objective`. `temperature` divides the logits before log-probabilities and entropies are taken.
    """

    needs: frozenset[str]
    temperature: float = 1.0
    spans: Spans = field(factory=Spans)

    def __call__(self, scores: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        """0, and the scores as per-token outputs under their names."""
        with self.spans("objective"):
            wanted = {name: scores[name] for name in sorted(self.needs)}
            like = next(iter(wanted.values()))
            return like.new_zeros(()), collect(micro_batch.samples, wanted, {}, Later(like.device), per_token_outputs=True)
