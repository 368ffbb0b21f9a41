"""Make plugins of code that was written for other engines, and use plugins in the trainers of others.

Public to plugins and programs; torch is imported when such a part is called.
"""

from skyrl_engine.interop.advantages import compute_advantages
from skyrl_engine.interop.hf_callback import hf_callback
from skyrl_engine.interop.hf_collator import hf_collator
from skyrl_engine.interop.hf_loss import hf_loss
from skyrl_engine.interop.masked_loss import masked_loss
from skyrl_engine.interop.metric_observer import metric_observer
from skyrl_engine.interop.padded_advantage import padded_advantage
from skyrl_engine.interop.pair_loss import pair_loss
from skyrl_engine.interop.trl_environment import trl_environment
from skyrl_engine.interop.trl_reward import trl_reward
from skyrl_engine.interop.verl_reward import verl_reward

__all__ = [
    "compute_advantages",
    "hf_callback",
    "hf_collator",
    "hf_loss",
    "masked_loss",
    "metric_observer",
    "padded_advantage",
    "pair_loss",
    "trl_environment",
    "trl_reward",
    "verl_reward",
]
