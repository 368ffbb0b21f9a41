"""`[reward_model]`: training a reward model, or having one reward attempts."""

from attrs import field, frozen
from attrs.validators import lt, min_len, optional

from skyrl_engine.contracts.values.model import PLACE


@frozen
class RewardModelConfig:
    """The recipe of trainer reward_model, or the reward model of trainer rl, whose value of an attempt is a part of its reward."""

    preset: str = "bradley_terry"
    """A published recipe by name, of trainer reward_model; every key of the configuration wins over it. `none` takes the engine's defaults."""

    path: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """A sequence classifier with one label, of trainer rl: a Hugging Face directory or hub id; none: environments alone give rewards."""

    revision: str | None = None
    """Branch, tag or commit of a reward model on the hub, of trainer rl."""

    weight: float = field(default=1.0, validator=lt(float("inf")))
    """Factor of the model's value in the reward, of trainer rl."""
