"""The critic's loss."""

from attrs import field, frozen
from attrs.validators import gt

from skyrl_engine import LossOutput, LossTokens, loss
from skyrl_engine_losses.ratio import fraction


@frozen
class ValueClipConfig:
    """The range around the old value within which a value may move."""

    clip: float = field(default=0.2, validator=gt(0.0))
    """Distance from the old value, in units of the return, beyond which moving a value no longer lowers the loss."""


@loss(needs=("values", "old_values", "returns"), config=ValueClipConfig)
def value_clip(tokens: LossTokens, config: ValueClipConfig) -> LossOutput:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, [n].

    The value loss of OpenAI's PPO implementation (github.com/openai/baselines, ppo2); no paper states it.
    """
    values, old, returns = tokens.values, tokens.old_values, tokens.returns
    plain = (values - returns).square()
    clipped = (values.clamp(old - config.clip, old + config.clip) - returns).square()
    return LossOutput(plain.maximum(clipped) / 2, {"clip_fraction": fraction(clipped.detach() > plain.detach())})
