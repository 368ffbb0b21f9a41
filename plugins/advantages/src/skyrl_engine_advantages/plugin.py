"""Entry points of the estimators.

In formulas, R is the sum of a trajectory's rewards over all its samples, G the number of finished trajectories of its group, mean and std
those of the group's R, with G - 1 under the root. Everything is computed in float64 and rounded to float32 once, by the engine.
"""

from collections.abc import Callable
from typing import Any, Literal

from attrs import evolve

from skyrl_engine import advantage
from skyrl_engine.contracts import REWARD_PARTS, AdvantageBatch, AdvantageClaims, AdvantageOutput, FloatArray
from skyrl_engine_advantages import vectorized
from skyrl_engine_advantages.options import (
    BaselineOptions,
    GaeOptions,
    GdpoOptions,
    GroupOptions,
    GrpoOptions,
    ReverseKlOptions,
    TokenOptions,
)

_BASELINE = AdvantageClaims(groups="needed", shift=True, scale="linear", zero_sum=True, outcome=True)


def _claims(default: AdvantageClaims) -> Callable[[Any], AdvantageClaims]:
    """Weaken the claims of an estimator as its options do: a division or a limit that others take part in."""

    def of_options(options: GroupOptions) -> AdvantageClaims:
        claims = default
        if options.normalize != "none":
            claims = evolve(claims, scale=_scale_claim(default, options))
        if options.normalize == "batch":
            claims = evolve(claims, whole_batch=True, zero_sum=False, shift=False)
        if options.clip is not None:
            claims = evolve(claims, zero_sum=False, scale=claims.scale if claims.scale == "invariant" else None)
        return claims

    return of_options


def _scale_claim(default: AdvantageClaims, options: GroupOptions) -> Literal["invariant"] | None:
    if default.scale == "invariant":  # a group's deviation is that of its rewards, and grows with them
        return "invariant" if options.normalize == "batch" else None
    return "invariant" if options.epsilon == 0 else None


@advantage(config=GrpoOptions, claims=_claims(_BASELINE))
def grpo(batch: AdvantageBatch, options: GrpoOptions) -> FloatArray:
    """The advantage (R - mean) / (std + epsilon): group-relative (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    It is exactly 0 where all rewards of a group are equal, and for a group of one.
    """
    return vectorized.grpo(batch, options)


@advantage(config=GroupOptions, claims=_claims(_BASELINE))
def dr_grpo(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """The advantage R - mean: without the division that favours groups of small deviation (Liu et al. 2025, arXiv:2503.20783)."""
    return vectorized.grpo(batch, options)


@advantage(config=GroupOptions, claims=_claims(_BASELINE))
def rloo(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """The advantage G / (G - 1) (R - mean), which is R minus the mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)."""
    return vectorized.rloo(batch, options)


@advantage(needs=(REWARD_PARTS,), config=GdpoOptions, claims=AdvantageClaims(groups="needed", whole_batch=True))
def gdpo(batch: AdvantageBatch, options: GdpoOptions) -> FloatArray:
    """The sum of weight_k (r_k - mean_k) / (std_k + epsilon) over the parts r_k of R, over its own deviation in the batch, plus epsilon.

    GDPO, Liu et al. 2026, arXiv:2601.05242: a reward of small spread counts as much as another. Mean and deviation of a part are those of the
    group's attempts that have it. The sums' mean is 0 by construction; their deviation is over attempts, with their number less 1 under the
    root. TRL's `multi_objective_aggregation="normalize_then_sum"` with `epsilon` 1e-4.
    """
    return vectorized.gdpo(batch, options)


@advantage(config=GroupOptions, claims=_claims(evolve(_BASELINE, shift=False, scale="invariant")))
def maxrl(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """The advantage (R - mean) / mean, and 0 where the mean is not above 0 (Tajwar et al. 2026, maximum-likelihood reinforcement learning)."""
    return vectorized.maxrl(batch, options)


@advantage(config=BaselineOptions, claims=_claims(_BASELINE))
def reinforce_pp_baseline(batch: AdvantageBatch, options: BaselineOptions) -> FloatArray:
    """The advantage R - mean on every scored token, then normalised over the batch's scored tokens (Hu et al. 2025, arXiv:2501.03262)."""
    return vectorized.grpo(batch, options)


def _of_tokens(options: TokenOptions) -> AdvantageClaims:
    plain = options.normalize == "none"
    linear = plain and options.clip is None
    return AdvantageClaims(groups="ignored", returns=True, whole_batch=not plain, scale="linear" if linear else None)


@advantage(config=TokenOptions, claims=_of_tokens)
def reinforce_pp(batch: AdvantageBatch, options: TokenOptions) -> AdvantageOutput:
    """The discounted sum of rewards from a token on, over scored tokens, normalised over the batch's (Hu et al. 2025, arXiv:2501.03262).

    Returns are the same sums, not normalised.
    """
    return vectorized.reinforce_pp(batch, options)


def _of_gae(options: GaeOptions) -> AdvantageClaims:
    return evolve(_of_tokens(options), scale=None)


@advantage(needs=("old_values",), config=GaeOptions, claims=_of_gae)
def gae(batch: AdvantageBatch, options: GaeOptions) -> AdvantageOutput:
    """Generalized advantage estimation over scored tokens (Schulman et al. 2016, arXiv:1506.02438), normalised over the batch's.

    Returns are the estimates, not normalised, plus the values that the model had before the step.
    """
    return vectorized.gae(batch, options)


def _of_teacher(options: ReverseKlOptions) -> AdvantageClaims:
    return AdvantageClaims(groups="ignored", whole_batch=options.normalize == "batch")


@advantage(needs=("old_logprobs", "teacher_logprobs"), config=ReverseKlOptions, claims=_of_teacher)
def reverse_kl(batch: AdvantageBatch, options: ReverseKlOptions) -> FloatArray:
    """The teacher's log-probability of a token minus the student's, plus `reward_coef` times its reward, discounted over later ones.

    Its mean is minus the reverse divergence, KL(student, teacher), per token, of which `gamma` 0 follows the gradient at each token given those
    before it: on-policy distillation (Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab; Agarwal et al. 2024, arXiv:2306.13649).
    """
    return vectorized.reverse_kl(batch, options)
