"""The loss of each source of a micro-batch's samples: for a run over several datasets or environments."""

from collections.abc import Mapping

import numpy as np
import torch

from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.objective.samples import ScoredSamples


def sum_by_source(weights: torch.Tensor, token_loss: torch.Tensor, samples: ScoredSamples) -> dict[int, torch.Tensor]:
    """Sum weight times loss over the tokens, both [n], of each source that has a token here; scalars, float64. None without sources.

    On the device, and without waiting for it.
    """
    if samples.sources is None:
        return {}
    of_tokens = samples.sources[samples.sequence_index]
    values, index = (weights * token_loss.detach()).double(), torch.from_numpy(of_tokens).to(token_loss.device)
    return {source: torch.where(index == source, values, 0.0).sum() for source in np.unique(of_tokens).tolist()}


def losses_of_sources(sums: Mapping[int, float], samples: ScoredSamples) -> dict[str, Metric]:
    """Return `loss/NUMBER` for each source: the mean of its tokens' losses by the reducer's weights, which micro-batches and ranks add up to.

    The losses of all sources, each times its share of the weights, add up to `loss` over the sum of all weights.
    """
    if samples.sources is None:
        return {}
    of_tokens = samples.sources[samples.sequence_index]
    return {
        f"loss/{source}": Metric.mean(total, float(samples.weights[of_tokens == source].sum())) for source, total in sums.items()
    }
