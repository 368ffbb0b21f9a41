"""Make plugins of code that was written for other engines. Public to plugins; torch is imported when such a plugin is called."""

from skyrl_engine.interop.masked_loss import masked_loss
from skyrl_engine.interop.padded_advantage import padded_advantage
from skyrl_engine.interop.pair_loss import pair_loss

__all__ = ["masked_loss", "padded_advantage", "pair_loss"]
