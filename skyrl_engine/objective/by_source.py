"""The loss of each source of a micro-batch's samples: for a run over several datasets or environments."""

import numpy as np
import torch

from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.objective.behind import to_device
from skyrl_engine.objective.samples import ScoredSamples


def losses_of_sources(weights: torch.Tensor, token_loss: torch.Tensor, samples: ScoredSamples) -> dict[str, Metric]:
    """Return `loss/NUMBER` of each source that has a token here: the mean, by the reducer's weights, of its tokens' losses, both [n].

    Micro-batches and ranks add up to it. The losses of all sources, each times its share of the weights, add up to `loss` over the sum of
    all weights. None without sources. Sums are float64.
    """
    if samples.sources is None:
        return {}
    of_tokens = samples.sources[samples.sequence_index]
    values, index = (weights * token_loss.detach()).double(), to_device(torch.from_numpy(of_tokens), token_loss.device)
    return {
        f"loss/{source}": Metric.mean(
            torch.where(index == source, values, 0.0).sum(), float(samples.weights[of_tokens == source].sum())
        )
        for source in np.unique(of_tokens).tolist()
    }
