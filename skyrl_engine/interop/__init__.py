"""Make plugins of code that was written for other engines, and use plugins in the trainers of others.

Public to plugins and programs; torch is imported when such a part is called.
"""

from skyrl_engine.interop.hf_loss import hf_loss
from skyrl_engine.interop.masked_loss import masked_loss
from skyrl_engine.interop.padded_advantage import padded_advantage
from skyrl_engine.interop.pair_loss import pair_loss

__all__ = ["hf_loss", "masked_loss", "padded_advantage", "pair_loss"]
