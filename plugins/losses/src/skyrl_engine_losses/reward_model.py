"""Losses of reward models: one number for an answer, from pairs of a chosen and a rejected one, and one for each step of an answer."""

from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine import LossOutput, LossTokens, Metric, loss
from skyrl_engine_losses.preference import softplus


@frozen
class BradleyTerryConfig:
    """Margins of the data, and how strongly rewards are held around 0."""

    margins: bool = False
    """Read the column `margin`, one number per pair: the reward by which the chosen answer should be ahead."""

    center_coefficient: float = field(default=0.0, validator=ge(0.0))
    """Weight of the squared sum of a pair's rewards, which a difference alone leaves free."""


def _needs(config: BradleyTerryConfig) -> tuple[str, ...]:
    return ("values", "margin", "sample:role") if config.margins else ("values", "sample:role")


@loss(needs=_needs, config=BradleyTerryConfig, unit_size=2, reducers=("sequence_mean",))
def bradley_terry(tokens: LossTokens, config: BradleyTerryConfig) -> LossOutput:
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2, [n], with the reward r the mean value of an answer's loss-carrying tokens.

    Trainer reward_model leaves an answer one such token, so that r is the value at the end of its text. Bradley and Terry 1952; Ouyang et al.
    2022, arXiv:2203.02155, equation 1; the margin m is that of Touvron et al. 2023 (Llama 2), arXiv:2307.09288, equation 2; the square with
    the coefficient c centers rewards, Eisenstein et al. 2023, arXiv:2312.09244.
    """
    chosen, rejected = (half.mean(tokens.values) for half in (tokens.pairs.chosen, tokens.pairs.rejected))
    ahead = chosen - rejected
    if config.margins:
        ahead = ahead - tokens.pairs.chosen.mean(tokens.margin)
    values = softplus(-ahead)
    if config.center_coefficient:
        values = values + config.center_coefficient * (chosen + rejected).square()
    chosen, rejected = chosen.detach(), rejected.detach()
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "rewards/mean": (chosen + rejected) / 2,
    }
    metrics = {name: Metric.mean(mean.sum(), len(mean)) for name, mean in means.items()}
    if len(chosen):
        metrics |= {
            "rewards/min": Metric.min(chosen.minimum(rejected).min()),
            "rewards/max": Metric.max(chosen.maximum(rejected).max()),
        }
    return LossOutput(tokens.pairs.broadcast(values), metrics)


@loss(needs=("values", "step_label"))
def step_cross_entropy(tokens: LossTokens, _config: None) -> LossOutput:
    """-log p(y), [n], of the label y of a step, with p(right) = sigmoid(v) of the value v after it.

    The cross entropy of a token classifier with two labels whose logits differ by v. Uesato et al. 2022, arXiv:2211.14275; Lightman et al.
    2023, arXiv:2305.20050.
    """
    right = tokens.step_label > 0
    values = tokens.values
    losses = softplus(values) * (~right) + softplus(-values) * right
    said = values.detach()
    count = len(said)
    hits = ((said > 0) == right).to(said.dtype)
    metrics = {
        "steps/accuracy": Metric.mean(hits.sum(), count),
        "steps/right": Metric.mean(right.to(said.dtype).sum(), count),
        "steps/probability": Metric.mean(said.sigmoid().sum(), count),
    }
    return LossOutput(losses, metrics)
