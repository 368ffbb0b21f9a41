"""Losses of preferences: one value per pair of a chosen and a rejected answer, or per judged answer, at each of its tokens.

With the reducer `sequence_mean` the objective is the mean over pairs, or over judged answers. w is the chosen answer, l the rejected one;
log p(y) is the sum over an answer's loss-carrying tokens.
"""

import math
from typing import TYPE_CHECKING, Literal, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, lt, optional

from skyrl_engine import LossOutput, LossTokens, Metric, loss

if TYPE_CHECKING:
    import torch

    from skyrl_engine.contracts import PairHalf

_REDUCERS = ("sequence_mean",)
_LEAST_REMAINDER = 1e-7
"""Smallest 1 - P that odds are taken of; beyond it an answer's odds no longer grow."""

_LARGEST_EXPONENT = 40.0
"""Largest logarithm of what is exponentiated, in nats: beyond it a score no longer grows, and its gradient is 0."""

Form = Literal[
    "sigmoid",
    "robust",
    "ipo",
    "hinge",
    "exo_pair",
    "discopop",
    "apo_zero",
    "apo_down",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
]
OF_MARGIN = ("sigmoid", "robust", "ipo", "hinge", "exo_pair", "discopop")
"""Forms that are functions of the margin alone."""
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
"""Forms that read `label_smoothing`."""
SORTED = ("aot", "aot_unpaired")
"""Forms that compare the pairs of a micro-batch in their order by log-ratio."""

FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@frozen
class DpoConfig:
    """The form of the loss, the strength of the reference, and how log-ratios are measured."""

    form: Form = field(default="sigmoid", validator=in_(get_args(Form)))
    """Function of the rewards of a pair: `sigmoid`, `robust`, `ipo`, `hinge`, `exo_pair`, `discopop`, `apo_zero`, `apo_down`, `nca_pair`,
    `bco_pair`, `sppo_hard`, `aot` or `aot_unpaired`."""

    beta: float = field(default=0.1, validator=gt(0.0))
    """Strength with which the reference holds the model; a reward is `beta` times the log-ratio to the reference."""

    label_smoothing: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    """Probability that a label is wrong, of the forms `sigmoid`, `robust`, `exo_pair` (which needs one), `aot` and `aot_unpaired`."""

    length_normalized: bool = field(default=False)
    """Divide the score of an answer, of which differences are taken, by the number of its tokens."""

    f_divergence: FDivergence = field(default="reverse_kl", validator=in_(get_args(FDivergence)))
    """Divergence that holds the model to the reference: `reverse_kl`, `forward_kl`, `js_divergence` or `alpha_divergence`. All but the first
    are of forms of the margin alone: `sigmoid`, `robust`, `ipo`, `hinge`, `exo_pair` and `discopop`."""

    f_alpha: float = field(default=0.5)
    """Coefficient a of `alpha_divergence`; not 1, which is `reverse_kl`."""

    ld_alpha: float | None = field(default=None, validator=optional([ge(0.0), le(1.0)]))
    """Weight of an answer's tokens beyond the length of the shorter answer of its pair; none: all tokens count alike."""

    weighted: bool = False
    """Multiply a pair's loss by how likely the model is to write both its answers, for pairs that others wrote."""

    discopop_tau: float = field(default=0.05, validator=[gt(0.0), le(1.0)])
    """Width, in margins, of the passage from the logistic to the exponential part of `discopop`."""

    @label_smoothing.validator
    def _only_of_some_forms(self, _attribute: object, value: float) -> None:
        if value and self.form not in SMOOTHED:
            raise ValueError(f'belongs to the forms {", ".join(SMOOTHED)}, and form is "{self.form}"')
        if not value and self.form == "exo_pair":
            raise ValueError('must be above 0 with the form "exo_pair", which takes its logarithm; its paper has 0.001')

    @length_normalized.validator
    def _refuse_sorted_forms(self, _attribute: object, value: bool) -> None:
        if value and self.form in SORTED:
            raise ValueError(f'is not of the form "{self.form}", which sorts log-ratios of whole answers')

    @f_divergence.validator
    def _only_of_the_margin(self, _attribute: object, value: str) -> None:
        if value != "reverse_kl" and self.form not in OF_MARGIN:
            raise ValueError(f'is "{value}", which belongs to the forms {", ".join(OF_MARGIN)}, and form is "{self.form}"')

    @f_alpha.validator
    def _of_alpha_divergence(self, _attribute: object, value: float) -> None:
        if value != 0.5 and self.f_divergence != "alpha_divergence":
            raise ValueError(f'belongs to f_divergence = "alpha_divergence", and f_divergence is "{self.f_divergence}"')
        if value == 1:
            raise ValueError('is 1, of which the divergence is that of f_divergence = "reverse_kl"')

    @discopop_tau.validator
    def _of_discopop(self, _attribute: object, value: float) -> None:
        if value != 0.05 and self.form != "discopop":
            raise ValueError(f'belongs to the form "discopop", and form is "{self.form}"')


@frozen
class SimpoConfig:
    """The scale of rewards, and the margin they should differ by."""

    beta: float = field(default=2.0, validator=gt(0.0))
    """Scale of the reward, which is `beta` times the mean log-probability of an answer's tokens."""

    gamma: float = field(default=1.0, validator=ge(0.0))
    """Reward by which the chosen answer should be ahead."""

    label_smoothing: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    """Probability that a label is wrong."""

    reward_alpha: float = 0.0
    """Shape a of the reward, `beta` (1 - P^-a) / a of the geometric mean P of an answer's probabilities; 0: `beta` log P."""


CpoForm = Literal["sigmoid", "hinge", "ipo"]


@frozen
class CpoConfig:
    """The form of the loss, the scale of rewards, and the weight of the likelihood."""

    form: CpoForm = field(default="sigmoid", validator=in_(get_args(CpoForm)))
    """Function of the margin: `sigmoid`, `hinge` or `ipo`."""

    beta: float = field(default=0.1, validator=gt(0.0))
    """Scale of the reward, which is `beta` times the log-probability of an answer."""

    alpha: float = field(default=1.0, validator=ge(0.0))
    """Weight of the negative log-likelihood of the chosen answer."""

    label_smoothing: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    """Probability that a label is wrong, of the form `sigmoid`."""

    length_normalized: bool = False
    """Take the mean log-probability of an answer's tokens in the place of their sum, in the margin."""

    reward_alpha: float = 0.0
    """Shape a of the reward, `beta` (1 - P^-a) / a of the probability P of an answer; 0: `beta` log P."""

    @label_smoothing.validator
    def _only_of_sigmoid(self, _attribute: object, value: float) -> None:
        if value and self.form != "sigmoid":
            raise ValueError(f'belongs to the form "sigmoid", and form is "{self.form}"')


@frozen
class OrpoConfig:
    """The weight of the odds ratio."""

    lam: float = field(default=0.1, validator=gt(0.0))
    """Weight of the odds-ratio loss next to the negative log-likelihood of the chosen answer."""


KtoForm = Literal["kto", "apo_zero_unpaired"]


@frozen
class KtoConfig:
    """The form of the loss, the strength of the reference, and the weights of either judgement."""

    form: KtoForm = field(default="kto", validator=in_(get_args(KtoForm)))
    """`kto`, which compares with a baseline of the mini-batch, or `apo_zero_unpaired`, whose baseline is 0."""

    beta: float = field(default=0.1, validator=gt(0.0))
    """Strength with which the reference holds the model; a reward is `beta` times the log-ratio to the reference."""

    desirable_weight: float = field(default=1.0, validator=gt(0.0))
    """Weight of chosen answers."""

    undesirable_weight: float = field(default=1.0, validator=gt(0.0))
    """Weight of rejected answers."""


def _dpo_needs(config: DpoConfig) -> tuple[str, ...]:
    return ("logprobs", "ref_logprobs", *(("log_sum_squares",) if config.weighted else ()))


def _is_sorted(config: DpoConfig) -> bool:
    return config.form in SORTED


@loss(needs=_dpo_needs, config=DpoConfig, unit_size=2, reducers=_REDUCERS, batch_local=_is_sorted)
def dpo(tokens: LossTokens, config: DpoConfig) -> LossOutput:
    """Direct preference optimization, [n], by the log-ratios g = log p(y) - log ref(y), the rewards r = beta g and their margin m = r_w - r_l.

    `sigmoid`: -log s(m), Rafailov et al. 2023, arXiv:2305.18290, equation 7; with label smoothing e, -(1 - e) log s(m) - e log s(-m), Mitchell
    2023, https://ericmitchell.ai/cdpo.pdf, equation 3. `robust`: (-(1 - e) log s(m) + e log s(-m)) / (1 - 2e), Chowdhury et al. 2024,
    arXiv:2403.00409. `ipo`: (m / beta - 1 / (2 beta))^2, Azar et al. 2023, arXiv:2310.12036, equation 17. `hinge`: max(0, 1 - m), Zhao et al.
    2023, arXiv:2305.10425, and Liu et al. 2023, arXiv:2309.06657. `exo_pair`: s(m) (log s(m) - log(1 - e)) + s(-m) (log s(-m) - log e), Ji et
    al. 2024, arXiv:2402.00856, equation 16. `discopop`: (1 - s(m / t)) (-log s(m)) + s(m / t) exp(-m), Lu et al. 2024, arXiv:2406.08414,
    equation 5. `apo_zero`: 1 - s(r_w) + s(r_l), and `apo_down`: s(r_w) + 1 - s(m), D'Oosterlinck et al. 2024, arXiv:2408.06266, equations 7
    and 8. `nca_pair`: -log s(r_w) - log s(-r_w) / 2 - log s(-r_l) / 2, Chen et al. 2024, arXiv:2402.05369. `bco_pair`: -log s(r_w) -
    log s(-r_l), Jung et al. 2024, arXiv:2404.04656. `sppo_hard`: (g_w - 1 / (2 beta))^2 + (g_l + 1 / (2 beta))^2, Wu et al. 2024,
    arXiv:2405.00675, equation 4.7 of certain labels. `aot`: as `sigmoid` of the sorted log-ratios between the answers of all pairs, under the
    model and under the reference; `aot_unpaired`: of the sorted g_w and the sorted g_l; Melnyk et al. 2024, arXiv:2406.05882.

    With another `f_divergence` g is f'(p / ref) in the margin: Wang et al. 2023, arXiv:2309.16240. `ld_alpha`: Liu et al. 2024,
    arXiv:2409.06411. `weighted`: Zhou et al. 2024 (WPO), arXiv:2406.11827, equation 2. Exponents are at most 40.
    """
    pairs = tokens.pairs
    gains = tokens.logprobs - tokens.ref_logprobs
    share = _shares_beyond_the_shorter(tokens, config.ld_alpha)
    ratios = [half.sum(gains * share) for half in (pairs.chosen, pairs.rejected)]
    if config.form == "aot":
        between = (
            pairs.chosen.sum(values * share) - pairs.rejected.sum(values * share)
            for values in (tokens.logprobs, tokens.ref_logprobs)
        )
        values = _compare_in_order(config, *between)
    elif config.form == "aot_unpaired":
        values = _compare_in_order(config, *ratios)
    else:
        scores = [config.beta * _f_score(config, ratio) for ratio in ratios]
        if config.length_normalized:
            scores = [
                score / half.counts.clamp(min=1).to(score.dtype)
                for score, half in zip(scores, (pairs.chosen, pairs.rejected), strict=True)
            ]
        values = _of_margin(config, *scores) if config.form in OF_MARGIN else _of_rewards(config, *scores)
    if config.weighted:
        likely = (tokens.logprobs - tokens.log_sum_squares).detach()
        values = values * (pairs.chosen.mean(likely) + pairs.rejected.mean(likely)).exp()
    rewards = [config.beta * ratio for ratio in ratios]
    watched = _pair_metrics(tokens, *rewards, share=share)
    return LossOutput(pairs.broadcast(values), {**watched, "implicit_kl": _implicit_kl(tokens, gains)})


def _shares_beyond_the_shorter(tokens: LossTokens, ld_alpha: float | None) -> "torch.Tensor":
    """[n]: `ld_alpha` at tokens of an answer that come after as many as the shorter answer of its pair has, 1 at all others."""
    ones = tokens.logprobs.new_ones(len(tokens.logprobs))
    if ld_alpha is None:
        return ones
    pairs, sequences = tokens.pairs, tokens.sequences
    shorter = pairs.broadcast(pairs.chosen.counts.minimum(pairs.rejected.counts))
    place = ones.long().cumsum(0) - 1 - sequences.offsets[sequences.index]
    return ones.where(place < shorter, ld_alpha)


def _f_score(config: DpoConfig, ratio: "torch.Tensor") -> "torch.Tensor":
    """f'(u) of log u [P], without the constants that a difference loses; reverse KL's is log u."""
    match config.f_divergence:
        case "reverse_kl":
            return ratio
        case "forward_kl":
            return 1 - (-ratio).clamp(max=_LARGEST_EXPONENT).exp()
        case "js_divergence":
            return math.log(2) - softplus(-ratio)
        case "alpha_divergence":
            power = config.f_alpha - 1
            return (power * ratio).clamp(max=_LARGEST_EXPONENT).expm1() / power


def _of_margin(config: DpoConfig, chosen: "torch.Tensor", rejected: "torch.Tensor") -> "torch.Tensor":
    """[P] of the scores [P] of both halves, of forms of `OF_MARGIN`."""
    margin, wrong = chosen - rejected, config.label_smoothing
    match config.form:
        case "robust":
            return ((1 - wrong) * softplus(-margin) - wrong * softplus(margin)) / (1 - 2 * wrong)
        case "ipo":
            return ((margin - 0.5) / config.beta).square()
        case "hinge":
            return (1 - margin).clamp(min=0.0)
        case "exo_pair":
            right, other = -softplus(-margin), -softplus(margin)
            return right.exp() * (right - math.log1p(-wrong)) + other.exp() * (other - math.log(wrong))
        case "discopop":
            passed = margin / config.discopop_tau
            return (-passed).sigmoid() * softplus(-margin) + (-margin - softplus(-passed)).exp()
        case _:
            return _compute_smoothed_loss(margin, wrong)


def _of_rewards(config: DpoConfig, chosen: "torch.Tensor", rejected: "torch.Tensor") -> "torch.Tensor":
    """[P] of the rewards [P] of both halves, of the other forms."""
    match config.form:
        case "apo_zero":
            return (-chosen).sigmoid() + rejected.sigmoid()
        case "apo_down":
            return chosen.sigmoid() + (rejected - chosen).sigmoid()
        case "nca_pair":
            return softplus(-chosen) + (softplus(chosen) + softplus(rejected)) / 2
        case "bco_pair":
            return softplus(-chosen) + softplus(rejected)
        case _:
            return ((chosen - 0.5) / config.beta).square() + ((rejected + 0.5) / config.beta).square()


def _compare_in_order(config: DpoConfig, high: "torch.Tensor", low: "torch.Tensor") -> "torch.Tensor":
    """[P] of the differences of two sorted [P], each in the place of the pair whose number of `high` it has.

    Equal numbers have no order: each of them has the mean of the values, and of the gradients, of all their places.
    """
    (above, ties, counts), (below, *_) = _sort(high), _sort(low)
    values = _compute_smoothed_loss(config.beta * (above - below), config.label_smoothing)
    return (values.new_zeros(len(counts)).index_add(0, ties.sort()[0], values) / counts)[ties]


def _sort(numbers: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Return the sorted numbers [P], for each number [P] which of the different ones it is, and how often each of these occurs."""
    _, ties, counts = numbers.detach().unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call] # torch leaves it so
    means = numbers.new_zeros(len(counts)).index_add(0, ties, numbers) / counts
    return means[ties.sort()[0]], ties, counts


def _compute_smoothed_loss(margin: "torch.Tensor", wrong: float) -> "torch.Tensor":
    return (1 - wrong) * softplus(-margin) + wrong * softplus(margin)


@loss(needs=("logprobs",), config=SimpoConfig, unit_size=2, reducers=_REDUCERS)
def simpo(tokens: LossTokens, config: SimpoConfig) -> LossOutput:
    """-log sigmoid(r_w - r_l - gamma), [n], with the reward r = beta times the mean of log p over an answer's tokens.

    Simple preference optimization, Meng et al. 2024, arXiv:2405.14734, equation 6; with `reward_alpha` a, r = beta (1 - P^-a) / a of the
    geometric mean P: AlphaPO, Gupta et al. 2025, arXiv:2501.03884. It needs no reference.
    """
    halves = (tokens.pairs.chosen, tokens.pairs.rejected)
    chosen, rejected = (config.beta * _alpha_reward(half.mean(tokens.logprobs), config.reward_alpha) for half in halves)
    values = _compute_smoothed_loss(chosen - rejected - config.gamma, config.label_smoothing)
    return LossOutput(tokens.pairs.broadcast(values), _pair_metrics(tokens, chosen, rejected))


@loss(needs=("logprobs",), config=CpoConfig, unit_size=2, reducers=_REDUCERS)
def cpo(tokens: LossTokens, config: CpoConfig) -> LossOutput:
    """L(r_w - r_l) - alpha log p(y_w), [n], with the reward r = beta log p(y) and L(m) = -log sigmoid(m), or as `dpo`'s `hinge` and `ipo`.

    Contrastive preference optimization, Xu et al. 2024, arXiv:2401.08417, section 3; with `reward_alpha` a, r = beta (1 - p(y)^-a) / a:
    AlphaPO, Gupta et al. 2025, arXiv:2501.03884. It needs no reference.
    """
    pairs = tokens.pairs
    over = _means if config.length_normalized else _sums
    chosen, rejected = (
        config.beta * _alpha_reward(over(half, tokens.logprobs), config.reward_alpha) for half in (pairs.chosen, pairs.rejected)
    )
    margin = chosen - rejected
    match config.form:
        case "hinge":
            values = (1 - margin).clamp(min=0.0)
        case "ipo":
            values = ((margin - 0.5) / config.beta).square()
        case "sigmoid":
            values = _compute_smoothed_loss(margin, config.label_smoothing)
    values = values - config.alpha * pairs.chosen.sum(tokens.logprobs)
    return LossOutput(pairs.broadcast(values), _pair_metrics(tokens, chosen, rejected))


def _alpha_reward(logprobs: "torch.Tensor", alpha: float) -> "torch.Tensor":
    """(1 - P^-alpha) / alpha of log P [P], whose limit at 0 is log P."""
    return -(-alpha * logprobs).clamp(max=_LARGEST_EXPONENT).expm1() / alpha if alpha else logprobs


@loss(needs=("logprobs",), config=OrpoConfig, unit_size=2, reducers=_REDUCERS)
def orpo(tokens: LossTokens, config: OrpoConfig) -> LossOutput:
    """-log P_w - lam log sigmoid(log(odds_w / odds_l)), [n], with P the geometric mean of an answer's probabilities and odds = P / (1 - P).

    Odds ratio preference optimization, Hong et al. 2024, arXiv:2403.07691, equations 6 and 7. It needs no reference. 1 - P is at least 1e-7.
    """
    chosen, rejected = (half.mean(tokens.logprobs) for half in (tokens.pairs.chosen, tokens.pairs.rejected))
    ratio = _log_odds(chosen) - _log_odds(rejected)
    values = -chosen + config.lam * softplus(-ratio)
    return LossOutput(tokens.pairs.broadcast(values), _pair_metrics(tokens, config.lam * chosen, config.lam * rejected))


def _kto_needs(config: KtoConfig) -> tuple[str, ...]:
    return ("logprobs", "ref_logprobs", *(("kl_baseline",) if config.form == "kto" else ()), "sample:role")


@loss(needs=_kto_needs, config=KtoConfig, reducers=_REDUCERS)
def kto(tokens: LossTokens, config: KtoConfig) -> LossOutput:
    """W (1 - sigmoid(beta (g - z))) of a chosen answer and w (1 - sigmoid(beta (z - g))) of a rejected one, [n], with the log-ratio
    g = log p(y) - log ref(y), z the column `kl_baseline` and w the weight of the judgement.

    Kahneman-Tversky optimization, Ethayarajh et al. 2024, arXiv:2402.01306, equation 8. The baseline is one number of the whole mini-batch,
    computed before the update, so that the loss does not depend on the cut. `apo_zero_unpaired` has z = 0: D'Oosterlinck et al. 2024,
    arXiv:2408.06266.
    """
    sequences = tokens.sequences
    roles = sequences.roles
    assert roles is not None, "the engine gives the roles that are needed"
    gains = tokens.logprobs - tokens.ref_logprobs
    rewards = config.beta * sequences.sum(gains)
    baseline = config.beta * sequences.mean(tokens.kl_baseline) if config.form == "kto" else rewards.new_zeros(len(rewards))
    wanted = roles == 0
    sign = 1.0 - 2.0 * roles.to(rewards.dtype)
    weight = rewards.new_full((), config.desirable_weight).where(wanted, config.undesirable_weight)
    values = weight * (sign * (baseline - rewards)).sigmoid()
    judged = sequences.counts > 0
    metrics = {
        **{f"rewards/{name}": _mean(rewards, judged & here) for name, here in (("chosen", wanted), ("rejected", ~wanted))},
        **{
            f"logps/{name}": _mean(sequences.sum(tokens.logprobs), judged & here)
            for name, here in (("chosen", wanted), ("rejected", ~wanted))
        },
        **({"kl_baseline": _mean(baseline / config.beta, judged)} if config.form == "kto" else {}),
        "implicit_kl": _implicit_kl(tokens, gains),
    }
    return LossOutput(sequences.broadcast(values), metrics)


def _sums(half: "PairHalf", values: "torch.Tensor") -> "torch.Tensor":
    return half.sum(values)


def _means(half: "PairHalf", values: "torch.Tensor") -> "torch.Tensor":
    return half.mean(values)


def softplus(values: "torch.Tensor") -> "torch.Tensor":
    """log(1 + exp(x)) = -log sigmoid(-x), without overflow on either side and with the slope 1/2 at 0, where a run begins."""
    return values.logaddexp(values.new_zeros(()))


def _log_odds(logprobs: "torch.Tensor") -> "torch.Tensor":
    """log(P / (1 - P)) of log P."""
    return logprobs - (-logprobs.expm1()).clamp(min=_LEAST_REMAINDER).log()


def _pair_metrics(
    tokens: LossTokens, chosen: "torch.Tensor", rejected: "torch.Tensor", *, share: "torch.Tensor | None" = None
) -> dict[str, Metric]:
    """Means over pairs: rewards of both halves, their margin, how often it is positive, and log-probabilities of whole answers.

    `share` [n] says how much each token counts in the last.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    logprobs = tokens.logprobs.detach() if share is None else tokens.logprobs.detach() * share
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "logps/chosen": tokens.pairs.chosen.sum(logprobs),
        "logps/rejected": tokens.pairs.rejected.sum(logprobs),
    }
    return {name: Metric.mean(values.sum(), len(values)) for name, values in means.items()}


def _implicit_kl(tokens: LossTokens, gains: "torch.Tensor") -> Metric:
    """The mean over answers of log p(y) - log ref(y), in nats."""
    return Metric.mean(gains.detach().sum(), (tokens.sequences.counts > 0).sum())


def _mean(values: "torch.Tensor", chosen: "torch.Tensor") -> Metric:
    """The mean of `values` [S] where `chosen` bool[S] holds."""
    return Metric.mean(values.detach().masked_fill(~chosen, 0.0).sum(), chosen.sum())
