"""The penalty in the reward for leaving the reference model, and its adaptive coefficient."""

import numpy as np
import numpy.typing as npt
from attrs import define

from skyrl_engine.config.schema import RewardKlConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.objective.policy_metrics import OLD_LOGPROBS, ROLLOUT_LOGPROBS
from skyrl_engine.training.reference import REFERENCE

FloatArray = npt.NDArray[np.float64]


def divergence(estimator: str, policy: FloatArray, reference: FloatArray) -> FloatArray:
    """Estimate KL(policy, reference) per token sampled by the policy, float64 [n] (Schulman 2020, "Approximating KL divergence")."""
    log_ratio = policy - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio * log_ratio / 2
    return np.exp(-log_ratio) - 1 + log_ratio


@define
class KlPenalty:
    """Takes coefficient times divergence off the reward of every sampled token.

    With a target the coefficient follows the divergence per attempt (Ziegler et al. 2019, arXiv:1909.08593, section 2.2):
    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * attempts / horizon.
    """

    config: RewardKlConfig
    coef: float

    @classmethod
    def start(cls, config: RewardKlConfig) -> "KlPenalty":
        return cls(config, config.coef)

    def apply(self, columns: SampleColumns) -> tuple[SampleColumns, dict[str, Metric]]:
        """Return the columns with the penalty in `rewards`, and the metrics `reward/kl` (per attempt) and `policy/kl_coef`.

        The policy's log-probabilities are `old_logprobs` where they were scored, else the sampler's. The coefficient is then steered.
        """
        policy = columns.columns.get(OLD_LOGPROBS, columns.columns[ROLLOUT_LOGPROBS]).astype(np.float64)
        scored = columns.loss_weight != 0
        per_token = np.where(scored, divergence(self.config.estimator, policy, columns.columns[REFERENCE].astype(np.float64)), 0.0)
        attempts = len(np.unique(columns.trajectory_ids))
        total = float(per_token.sum())
        coef = self.coef
        rewards = columns.columns["rewards"] - coef * per_token
        if self.config.target is not None and attempts:
            error = min(0.2, max(-0.2, total / attempts / self.config.target - 1))
            self.coef *= 1 + error * attempts / self.config.horizon
        metrics = {"reward/kl": Metric.mean(total, attempts), "policy/kl_coef": Metric.mean(coef, 1)}
        return columns.with_columns({"rewards": rewards}), metrics
