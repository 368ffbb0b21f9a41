"""Losses that bring a student's next-token distribution to a teacher's. p is the teacher's probability of a token, q the student's."""

from typing import TYPE_CHECKING, Literal, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, lt, optional

from skyrl_engine import LossOutput, LossTokens, Metric, loss
from skyrl_engine.contracts import TOP_1_AGREEMENT, AlignedDivergence, Divergence, DivergenceKind
from skyrl_engine_losses.estimators import Estimator, estimate_kl

if TYPE_CHECKING:
    import torch

Rest = Literal["one", "none", "normalize"]

_LEAST_REST = 1e-6
"""Smallest probability of all tokens besides the k, as float32's log-probabilities hardly tell a smaller one from 0. Below it the rest has no
gradient."""


@frozen
class TopKDivergenceConfig:
    """The divergence between two distributions, and what becomes of the tokens that the teacher's k do not name."""

    divergence: DivergenceKind = field(default="forward", validator=in_(get_args(DivergenceKind)))
    """`forward` KL(p || q), `reverse` KL(q || p), or `jensen_shannon`, the generalised one of GKD by `beta`."""

    beta: float = field(default=0.5, validator=[gt(0.0), lt(1.0)])
    """Share of the teacher in the mixture of `jensen_shannon`: near 0 its gradient points as `forward`'s, near 1 as `reverse`'s."""

    rest: Rest = field(default="one", validator=in_(get_args(Rest)))
    """All tokens besides the k: they count as `one` token more, as `none`, or both distributions are made to add up to 1 over the k alone
    (`normalize`)."""


@loss(needs=("logprobs_at:teacher_ids", "teacher_logprobs[k]"), config=TopKDivergenceConfig)
def top_k_divergence(tokens: LossTokens, config: TopKDivergenceConfig) -> LossOutput:
    """A divergence between teacher and student over the teacher's k likeliest tokens, [n] in nats.

    `forward`: sum p log(p / q), Hinton et al. 2015, arXiv:1503.02531. `reverse`: sum q log(q / p), Gu et al. 2023, arXiv:2306.08543.
    `jensen_shannon`: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, Agarwal et al. 2023, arXiv:2306.13649, equation 1.
    """
    student, teacher = tokens.logprobs_at("teacher_ids"), tokens.teacher_logprobs
    same = teacher.argmax(-1) == student.detach().argmax(-1)
    if config.rest == "one":
        student, teacher = _with_rest(student), _with_rest(teacher)
    elif config.rest == "normalize":
        student, teacher = (logprobs - logprobs.logsumexp(-1, keepdim=True) for logprobs in (student, teacher))
    values = _between(config, teacher, student)
    return LossOutput(
        values,
        {
            "divergence": Metric.mean(values.detach().sum(), len(values)),
            "top_1_agreement": Metric.mean(same.sum(), len(values)),
        },
    )


def _with_rest(logprobs: "torch.Tensor") -> "torch.Tensor":
    """Extend [n, k] to [n, k + 1]: after the k, the logarithm of the probability that they leave."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST).log()
    # written into a tensor of its own, as tensor methods do not concatenate
    joined = logprobs.new_zeros(*logprobs.shape[:-1], logprobs.shape[-1] + 1)
    joined[..., :-1] = logprobs
    joined[..., -1:] = rest
    return joined


def _between(config: TopKDivergenceConfig, teacher: "torch.Tensor", student: "torch.Tensor") -> "torch.Tensor":
    """[n] of log-probabilities [n, k]."""
    match config.divergence:
        case "forward":
            return _kl(teacher, student)
        case "reverse":
            return _kl(student, teacher)
        case "jensen_shannon":
            share = teacher.new_full((), config.beta)
            mixture = (teacher + share.log()).logaddexp(student + (1 - share).log())
            return share * _kl(teacher, mixture) + (1 - share) * _kl(student, mixture)


def _kl(first: "torch.Tensor", second: "torch.Tensor") -> "torch.Tensor":
    return (first.exp() * (first - second)).sum(-1)


@frozen
class DivergenceConfig:
    """The divergence between two distributions over the whole vocabulary."""

    divergence: DivergenceKind = field(default="forward", validator=in_(get_args(DivergenceKind)))
    """`forward` KL(p || q), `reverse` KL(q || p), or `jensen_shannon`, the generalised one of GKD by `beta`."""

    beta: float = field(default=0.5, validator=[gt(0.0), lt(1.0)])
    """Share of the teacher in the mixture of `jensen_shannon`: near 0 its gradient points as `forward`'s, near 1 as `reverse`'s."""

    temperature: float = field(default=1.0, validator=[gt(0.0), lt(float("inf"))])
    """Divides the logits of both, which the run's own temperature has divided already. Nothing is multiplied by its square."""

    @property
    def score(self) -> Divergence:
        """The score of the model that it is."""
        return Divergence(self.divergence, self.beta, self.temperature)


def _needs(config: DivergenceConfig) -> tuple[str, ...]:
    return (config.score.need, TOP_1_AGREEMENT)


@loss(needs=_needs, config=DivergenceConfig)
def divergence(tokens: LossTokens, _config: DivergenceConfig) -> LossOutput:
    """A divergence between teacher and student over the whole vocabulary, [n] in nats, of a frozen teacher on the same ranks.

    `forward`: sum p log(p / q), Hinton et al. 2015, arXiv:1503.02531. `reverse`: sum q log(q / p), Gu et al. 2023, arXiv:2306.08543.
    `jensen_shannon`: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, Agarwal et al. 2023, arXiv:2306.13649, equation 1.
    """
    values = tokens.divergence
    return LossOutput(
        values,
        {
            "divergence": Metric.mean(values.detach().sum(), len(values)),
            "top_1_agreement": Metric.mean(tokens.top_1_agreement.sum(), len(values)),
        },
    )


@frozen
class UldConfig:
    """Nothing to set: probabilities are compared by their ranks."""

    @property
    def score(self) -> AlignedDivergence:
        """The score of the model that it is."""
        return AlignedDivergence("uld")


@frozen
class GoldConfig:
    """The divergence over tokens that both tokenizers write equally, and the weights of these and of the other tokens."""

    beta: float = field(default=0.5, validator=[ge(0.0), le(1.0)])
    """Share of the teacher in the mixture of GKD's divergence; 0 is `forward`, 1 `reverse`."""

    matched_weight: float | None = field(default=None, validator=optional([ge(0.0), lt(float("inf"))]))
    """Weight of equally written tokens; none: their share of the teacher's vocabulary. Give it with `unmatched_weight`."""

    unmatched_weight: float | None = field(default=None, validator=optional([ge(0.0), lt(float("inf"))]))
    """Weight of the other tokens; none: the rest of the share."""

    def __attrs_post_init__(self) -> None:
        if (self.matched_weight is None) != (self.unmatched_weight is None):
            raise ValueError("'matched_weight' and 'unmatched_weight' must be given together")

    @property
    def score(self) -> AlignedDivergence:
        """The score of the model that it is."""
        return AlignedDivergence("gold", self.beta, self.matched_weight, self.unmatched_weight)


def _aligned_needs(config: UldConfig | GoldConfig) -> tuple[str, ...]:
    return (config.score.need,)


def _measure_divergence_of_texts(tokens: LossTokens) -> LossOutput:
    values = tokens.divergence
    return LossOutput(values, {"divergence": Metric.mean(values.detach().sum(), len(values))})


@loss(needs=_aligned_needs, config=UldConfig)
def uld(tokens: LossTokens, _config: UldConfig) -> LossOutput:
    """The universal logit distance from a teacher of any tokenizer, [n]: the sum over ranks of |q - p|, of sorted probabilities.

    Boizard et al. 2024, arXiv:2402.12030, equation 6. It stands at the last token of each group of tokens that is the same text for both, and
    is 0 at other tokens.
    """
    return _measure_divergence_of_texts(tokens)


@loss(needs=_aligned_needs, config=GoldConfig)
def gold(tokens: LossTokens, _config: GoldConfig) -> LossOutput:
    """A divergence from a teacher of any tokenizer over equally written tokens, and the distance of `uld` over the others, [n].

    Patino et al. 2025, "Unlocking On-Policy Distillation for Any Model Family" (GOLD), at the places of `uld`.
    """
    return _measure_divergence_of_texts(tokens)


@frozen
class TeacherKlConfig:
    """The estimator of the divergence at one token."""

    estimator: Estimator = field(default="k2", validator=in_(get_args(Estimator)))
    """With d = log q - log p: `k1` is d, `abs` |d|, `k2` d^2 / 2 and `k3` exp(-d) + d - 1, which is never negative."""


@loss(needs=("logprobs", "teacher_logprobs"), config=TeacherKlConfig)
def teacher_kl(tokens: LossTokens, config: TeacherKlConfig) -> LossOutput:
    """An estimate of KL(q || p) at each token that the student itself sampled, [n] in nats: Schulman 2020, http://joschu.net/blog/kl-approx.html.

    The gradient of `k2`, d times that of log q, is on average over the student's samples the gradient of KL(q || p). That of `k1` is 0 on
    average, and that of `k3` is the forward divergence's. `k3` is clamped as in `kl`. `divergence` is the mean of d, which is no estimate of
    a loss but of KL(q || p) itself.
    """
    difference = tokens.logprobs - tokens.teacher_logprobs
    values = estimate_kl(config.estimator, difference)
    return LossOutput(values, {"divergence": Metric.mean(difference.detach().sum(), len(values))})
