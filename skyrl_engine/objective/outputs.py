"""Turn a micro-batch's tensors into columnar outputs. The gate for per-token outputs is here and nowhere else."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from skyrl_engine.contracts.values.outputs import Metric, RankOutput
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.samples import ScoredSamples

if TYPE_CHECKING:
    import torch


def numbers_per_token(scores: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return the scores as outputs are, one number per token: one of k numbers, [n, k], is the k outputs NAME[0] to NAME[k - 1]."""
    outputs: dict[str, torch.Tensor] = {}
    for name, score in scores.items():
        outputs |= (
            {name: score} if score.ndim == 1 else {f"{name}[{place}]": column for place, column in enumerate(score.unbind(1))}
        )
    return outputs


def collect(
    samples: ScoredSamples,
    values: "Mapping[str, torch.Tensor]",
    metrics: Mapping[str, Metric],
    later: Later,
    *,
    per_token_outputs: bool,
) -> RankOutput:
    """Outputs of one micro-batch; `values` are [n] tensors. They and the metrics arrive `later`: whoever reads them waits.

    With the gate off no value is copied and every sample's record is empty.
    """
    metrics = later.send_metrics(metrics)
    if not per_token_outputs:
        nothing = Ragged(np.zeros(0, dtype=np.int32), np.zeros(len(samples.sample_ids) + 1, dtype=np.int64))
        return RankOutput(samples.sample_ids, samples.action_lengths, nothing, {}, metrics)
    fields = later.send_fields(values, samples.scored.offsets)
    return RankOutput(samples.sample_ids, samples.action_lengths, samples.scored, fields, metrics)
