"""An adapted loss keeps what the kit asks of any loss: the padding around it and the derivative that it is read from leave no trace."""

from skyrl_engine.contracts.kinds.loss import Loss
from skyrl_engine.interop import masked_loss
from skyrl_engine.testing import LossConformance


def ratio_loss(log_probs, old_log_probs, advantages):
    return -(log_probs - old_log_probs).clamp(-20, 20).exp() * advantages


def summed(log_probs, old_log_probs, advantages, config, loss_mask=None):
    loss = ratio_loss(log_probs, old_log_probs, advantages) * config.scale
    return (loss * loss_mask).sum(), {"ratio": ((loss != 0) * loss_mask).sum() / loss_mask.sum()}


def averaged(log_probs, old_log_probs, advantages, loss_mask):
    return (ratio_loss(log_probs, old_log_probs, advantages) * loss_mask).sum() / loss_mask.sum().clamp(min=1)


class TestSummed(LossConformance):
    examples = 15

    def loss(self) -> Loss:
        plugin = masked_loss(summed, config={"scale": 2.0}, homogeneous=True)
        return plugin.skyrl_engine_make_loss(config=plugin.skyrl_engine_config_schema()())

    def oracle(self, tokens):
        return 2 * ratio_loss(*(getattr(tokens, need).double() for need in ("logprobs", "old_logprobs", "advantages")))


class TestAveraged(LossConformance):
    examples = 15

    def loss(self) -> Loss:
        return masked_loss(averaged, reduction="token_mean", homogeneous=True).skyrl_engine_make_loss(config=None)

    def oracle(self, tokens):
        return ratio_loss(*(getattr(tokens, need).double() for need in ("logprobs", "old_logprobs", "advantages")))
