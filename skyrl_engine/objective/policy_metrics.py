"""Metrics of a policy that samples of its own are trained on: its entropy, and its distance from the old and the sampling policy."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Literal

import numpy as np
import torch

from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.contracts.values.roles import ROLES
from skyrl_engine.contracts.values.rollout_columns import ROLLOUT_STALENESS
from skyrl_engine.objective.behind import to_device
from skyrl_engine.objective.tokens import MicroBatchTokens

Watched = Literal["policy", "present_gap", "entropy", "logits"]
"""Distances between policies; the sampler's from the present policy instead of the old one; the model's entropy, and the mean of its logits at
chosen and at rejected answers, which cost passes over the vocabulary."""

_READS: Final[Mapping[Watched, tuple[str, ...]]] = {
    "policy": ("logprobs",),
    "entropy": ("entropy",),
    "logits": ("logsumexp", "mean_logprob"),
}
"""Scores of the model that metrics read."""

OLD_LOGPROBS: Final = "old_logprobs"
ROLLOUT_LOGPROBS: Final = "rollout_logprobs"

WEIGHTS: Final = ("policy/weight_count", "policy/weight_sum", "policy/weight_squares")
"""Sums that `effective_share` makes one number of: tokens, importance weights against the sampler, and their squares."""


def scores_for(watch: AbstractSet[Watched]) -> frozenset[str]:
    """Name the model scores that these metrics read."""
    return frozenset(score for name in watch for score in _READS.get(name, ()))


@torch.no_grad()
def policy_metrics(tokens: MicroBatchTokens, watch: AbstractSet[Watched]) -> dict[str, Metric]:
    """Metrics of the n tokens of a micro-batch; none where n is 0.

    `policy/entropy` is the mean entropy in nats. With `old_logprobs` (bound or a column), `policy/ratio_mean` and `ratio_max` are of the ratio
    to the old policy. With the column `rollout_logprobs`, `policy/gap_mean`, `gap_max` and `gap_k3` measure the distance of the old policy,
    or else the present one (always so with "present_gap"), from the sampler's log-probabilities; with the column `rollout_staleness` that of
    tokens which the trained weights sampled, and `policy/gap_stale_mean` and so on that of others. `logits/chosen` and `logits/rejected` are
    the means, over the vocabulary and over the tokens of a role, of what softmax is taken of.
    """
    count = len(tokens.like)
    if not count:
        return {}
    metrics: dict[str, Metric] = {}
    if "entropy" in watch:
        metrics["policy/entropy"] = Metric.mean(tokens.scores["entropy"].double().sum(), count)
    if "logits" in watch:
        logits = (tokens.scores["logsumexp"] + tokens.scores["mean_logprob"]).double()
        for role in ROLES:
            here = tokens.places_in_role("logits/*", role)
            metrics[f"logits/{role}"] = Metric.mean(logits.index_select(0, here).sum(), len(here))
    if "policy" not in watch:
        return metrics
    present = tokens.scores["logprobs"].double()
    columns = tokens.samples.columns
    old = tokens.scores[tokens.bound[OLD_LOGPROBS]].double() if OLD_LOGPROBS in tokens.bound else None
    if old is None and OLD_LOGPROBS in columns:
        old = tokens.column(OLD_LOGPROBS).double()
    if old is not None:
        ratio = (present - old).exp()
        metrics["policy/ratio_mean"] = Metric.mean(ratio.sum(), count)
        metrics["policy/ratio_max"] = Metric.max(ratio.max())
    if ROLLOUT_LOGPROBS in columns:
        sampled = tokens.column(ROLLOUT_LOGPROBS).double()
        gap = (present if old is None or "present_gap" in watch else old) - sampled
        if ROLLOUT_STALENESS in columns:
            stale = columns[ROLLOUT_STALENESS] > 0
            for chosen, name in ((~stale, "policy/gap"), (stale, "policy/gap_stale")):
                places = to_device(torch.from_numpy(np.flatnonzero(chosen)), gap.device)
                metrics |= _measure_gap(gap.index_select(0, places), name)
        else:
            metrics |= _measure_gap(gap, "policy/gap")
        weights = (present - sampled).exp()
        sums = (Metric.sum(count), Metric.sum(weights.sum()), Metric.sum(weights.square().sum()))
        metrics |= dict(zip(WEIGHTS, sums, strict=True))
    return metrics


def _measure_gap(gap: torch.Tensor, name: str) -> dict[str, Metric]:
    """Return mean, largest and k3 of distances float64[n] in nats; nothing where there are none."""
    count = len(gap)
    if not count:
        return {}
    return {
        f"{name}_mean": Metric.mean(gap.abs().sum(), count),
        f"{name}_max": Metric.max(gap.abs().max()),
        f"{name}_k3": Metric.mean((gap.exp() - 1 - gap).sum(), count),
    }


def effective_share(count: float, total: float, squares: float) -> float:
    """Effective sample size of importance weights as a share of their number: (sum w)^2 / (n sum w^2) (Kong 1992)."""
    return total * total / (count * squares) if squares else float("nan")
