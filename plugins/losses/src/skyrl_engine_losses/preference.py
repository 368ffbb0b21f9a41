"""Losses of preferences: one value per pair of a chosen and a rejected answer, or per judged answer, at each of its tokens.

With the reducer `sequence_mean` the objective is the mean over pairs, or over judged answers. w is the chosen answer, l the rejected one;
log p(y) is the sum over an answer's loss-carrying tokens.
"""

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, in_, lt

from skyrl_engine import LossOutput, LossTokens, Metric, loss

if TYPE_CHECKING:
    import torch

    from skyrl_engine.contracts import PairHalf

_REDUCERS = ("sequence_mean",)
_LEAST_REMAINDER = 1e-7
"""Smallest 1 - P that odds are taken of; beyond it an answer's odds no longer grow."""

Form = Literal["sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down"]
FORMS: tuple[Form, ...] = ("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down")


@frozen
class DpoConfig:
    """The form of the loss, and the strength of the reference."""

    form: Form = field(default="sigmoid", validator=in_(FORMS))
    """Function of the margin: `sigmoid`, `robust`, `ipo`, `hinge`, `apo_zero` or `apo_down`."""

    beta: float = field(default=0.1, validator=gt(0.0))
    """Strength with which the reference holds the model; a reward is `beta` times the log-ratio to the reference."""

    label_smoothing: float = field(default=0.0, validator=[ge(0.0), lt(0.5)])
    """Probability that a label is wrong, of the forms `sigmoid` and `robust`."""

    length_normalized: bool = False
    """Take the mean log-ratio of an answer's tokens in the place of their sum."""

    @label_smoothing.validator
    def _only_of_some_forms(self, _attribute: object, value: float) -> None:
        if value and self.form not in ("sigmoid", "robust"):
            raise ValueError(f'belongs to the forms "sigmoid" and "robust", and form is "{self.form}"')


@frozen
class SimpoConfig:
    """The scale of rewards, and the margin they should differ by."""

    beta: float = field(default=2.0, validator=gt(0.0))
    """Scale of the reward, which is `beta` times the mean log-probability of an answer's tokens."""

    gamma: float = field(default=1.0, validator=ge(0.0))
    """Reward by which the chosen answer should be ahead."""


@frozen
class CpoConfig:
    """The scale of rewards, and the weight of the likelihood."""

    beta: float = field(default=0.1, validator=gt(0.0))
    """Scale of the reward, which is `beta` times the log-probability of an answer."""

    alpha: float = field(default=1.0, validator=ge(0.0))
    """Weight of the negative log-likelihood of the chosen answer."""


@frozen
class OrpoConfig:
    """The weight of the odds ratio."""

    lam: float = field(default=0.1, validator=gt(0.0))
    """Weight of the odds-ratio loss next to the negative log-likelihood of the chosen answer."""


@frozen
class KtoConfig:
    """The strength of the reference, and the weights of either judgement."""

    beta: float = field(default=0.1, validator=gt(0.0))
    """Strength with which the reference holds the model; a reward is `beta` times the log-ratio to the reference."""

    desirable_weight: float = field(default=1.0, validator=gt(0.0))
    """Weight of chosen answers."""

    undesirable_weight: float = field(default=1.0, validator=gt(0.0))
    """Weight of rejected answers."""


@loss(needs=("logprobs", "ref_logprobs"), config=DpoConfig, unit_size=2, reducers=_REDUCERS)
def dpo(tokens: LossTokens, config: DpoConfig) -> LossOutput:
    """Direct preference optimization, [n], by the rewards r = beta (log p(y) - log ref(y)) and their margin m = r_w - r_l.

    `sigmoid`: -log s(m), Rafailov et al. 2023, arXiv:2305.18290, equation 7; with label smoothing e, -(1 - e) log s(m) - e log s(-m), Mitchell
    2023, https://ericmitchell.ai/cdpo.pdf, equation 3. `robust`: (-(1 - e) log s(m) + e log s(-m)) / (1 - 2e), Chowdhury et al. 2024,
    arXiv:2403.00409. `ipo`: (m / beta - 1 / (2 beta))^2, Azar et al. 2023, arXiv:2310.12036, equation 17. `hinge`: max(0, 1 - m), Zhao et al.
    2023, arXiv:2305.10425, and Liu et al. 2023, arXiv:2309.06657. `apo_zero`: 1 - s(r_w) + s(r_l), and `apo_down`: s(r_w) + 1 - s(m),
    D'Oosterlinck et al. 2024, arXiv:2408.06266, equations 7 and 8.
    """
    gains = tokens.logprobs - tokens.ref_logprobs
    over = _means if config.length_normalized else _sums
    chosen, rejected = (config.beta * over(half, gains) for half in (tokens.pairs.chosen, tokens.pairs.rejected))
    values = _of_margin(config, chosen, rejected)
    watched = _pair_metrics(tokens, chosen, rejected)
    return LossOutput(tokens.pairs.broadcast(values), {**watched, "implicit_kl": _implicit_kl(tokens, gains)})


def _of_margin(config: DpoConfig, chosen: "torch.Tensor", rejected: "torch.Tensor") -> "torch.Tensor":
    """[P] of the rewards [P] of both halves."""
    margin, wrong = chosen - rejected, config.label_smoothing
    match config.form:
        case "sigmoid":
            return (1 - wrong) * softplus(-margin) + wrong * softplus(margin)
        case "robust":
            return ((1 - wrong) * softplus(-margin) - wrong * softplus(margin)) / (1 - 2 * wrong)
        case "ipo":
            return ((margin - 0.5) / config.beta).square()
        case "hinge":
            return (1 - margin).clamp(min=0.0)
        case "apo_zero":
            return (-chosen).sigmoid() + rejected.sigmoid()
        case "apo_down":
            return chosen.sigmoid() + (-margin).sigmoid()


@loss(needs=("logprobs",), config=SimpoConfig, unit_size=2, reducers=_REDUCERS)
def simpo(tokens: LossTokens, config: SimpoConfig) -> LossOutput:
    """-log sigmoid(r_w - r_l - gamma), [n], with the reward r = beta times the mean of log p over an answer's tokens.

    Simple preference optimization, Meng et al. 2024, arXiv:2405.14734, equation 6. It needs no reference.
    """
    chosen, rejected = (config.beta * half.mean(tokens.logprobs) for half in (tokens.pairs.chosen, tokens.pairs.rejected))
    values = softplus(config.gamma - (chosen - rejected))
    return LossOutput(tokens.pairs.broadcast(values), _pair_metrics(tokens, chosen, rejected))


@loss(needs=("logprobs",), config=CpoConfig, unit_size=2, reducers=_REDUCERS)
def cpo(tokens: LossTokens, config: CpoConfig) -> LossOutput:
    """-log sigmoid(r_w - r_l) - alpha log p(y_w), [n], with the reward r = beta log p(y).

    Contrastive preference optimization, Xu et al. 2024, arXiv:2401.08417, section 3. It needs no reference.
    """
    pairs = tokens.pairs
    likelihood = pairs.chosen.sum(tokens.logprobs)
    chosen, rejected = config.beta * likelihood, config.beta * pairs.rejected.sum(tokens.logprobs)
    values = softplus(-(chosen - rejected)) - config.alpha * likelihood
    return LossOutput(pairs.broadcast(values), _pair_metrics(tokens, chosen, rejected))


@loss(needs=("logprobs",), config=OrpoConfig, unit_size=2, reducers=_REDUCERS)
def orpo(tokens: LossTokens, config: OrpoConfig) -> LossOutput:
    """-log P_w - lam log sigmoid(log(odds_w / odds_l)), [n], with P the geometric mean of an answer's probabilities and odds = P / (1 - P).

    Odds ratio preference optimization, Hong et al. 2024, arXiv:2403.07691, equations 6 and 7. It needs no reference. 1 - P is at least 1e-7.
    """
    chosen, rejected = (half.mean(tokens.logprobs) for half in (tokens.pairs.chosen, tokens.pairs.rejected))
    ratio = _log_odds(chosen) - _log_odds(rejected)
    values = -chosen + config.lam * softplus(-ratio)
    return LossOutput(tokens.pairs.broadcast(values), _pair_metrics(tokens, config.lam * chosen, config.lam * rejected))


@loss(
    needs=("logprobs", "ref_logprobs", "kl_baseline", "sample:role"),
    config=KtoConfig,
    reducers=_REDUCERS,
)
def kto(tokens: LossTokens, config: KtoConfig) -> LossOutput:
    """W (1 - sigmoid(beta (g - z))) of a chosen answer and w (1 - sigmoid(beta (z - g))) of a rejected one, [n], with the log-ratio
    g = log p(y) - log ref(y), z the column `kl_baseline` and w the weight of the judgement.

    Kahneman-Tversky optimization, Ethayarajh et al. 2024, arXiv:2402.01306, equation 8. The baseline is one number of the whole mini-batch,
    computed before the update, so that the loss does not depend on the cut.
    """
    sequences = tokens.sequences
    roles = sequences.roles
    assert roles is not None, "the engine gives the roles that are needed"
    gains = tokens.logprobs - tokens.ref_logprobs
    rewards = config.beta * sequences.sum(gains)
    baseline = config.beta * sequences.mean(tokens.kl_baseline)
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
        "kl_baseline": _mean(baseline / config.beta, judged),
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


def _pair_metrics(tokens: LossTokens, chosen: "torch.Tensor", rejected: "torch.Tensor") -> dict[str, Metric]:
    """Means over pairs: rewards of both halves, their margin, how often it is positive, and log-probabilities of whole answers."""
    chosen, rejected = chosen.detach(), rejected.detach()
    logprobs = tokens.logprobs.detach()
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "logps/chosen": tokens.pairs.chosen.sum(logprobs),
        "logps/rejected": tokens.pairs.rejected.sum(logprobs),
    }
    return {name: Metric.mean(values.sum().item(), len(values)) for name, values in means.items()}


def _implicit_kl(tokens: LossTokens, gains: "torch.Tensor") -> Metric:
    """The mean over answers of log p(y) - log ref(y), in nats."""
    return Metric.mean(gains.detach().sum().item(), (tokens.sequences.counts > 0).sum().item())


def _mean(values: "torch.Tensor", chosen: "torch.Tensor") -> Metric:
    """The mean of `values` [S] where `chosen` bool[S] holds."""
    return Metric.mean(values.detach().masked_fill(~chosen, 0.0).sum().item(), chosen.sum().item())
