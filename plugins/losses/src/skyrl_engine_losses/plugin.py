"""Entry points of this distribution. Formulas use tensor methods alone, so neither this module nor those it imports import torch."""

from skyrl_engine_losses.clipping import ppo, ppo_dual_clip
from skyrl_engine_losses.corrections import (
    off_policy_sequence_mask,
    outlier_sequence,
    sequence_mask,
    tis,
    token_mask,
    top_entropy,
)
from skyrl_engine_losses.covariance import clip_cov, kl_cov
from skyrl_engine_losses.critic import value_clip
from skyrl_engine_losses.cross_entropy import cross_entropy, label_smoothing
from skyrl_engine_losses.distillation import divergence, gold, teacher_kl, top_k_divergence, uld
from skyrl_engine_losses.off_policy import dro, importance_sampling
from skyrl_engine_losses.policy_gradient import cispo, reinforce, rollout_is, vespo
from skyrl_engine_losses.preference import cpo, dpo, kto, orpo, simpo
from skyrl_engine_losses.regularizers import entropy, kl, z_loss
from skyrl_engine_losses.reward_model import bradley_terry, step_cross_entropy
from skyrl_engine_losses.sequence_level import gmpo, gspo
from skyrl_engine_losses.trust_region import dppo, sapo

__all__ = [
    "bradley_terry",
    "cispo",
    "clip_cov",
    "cpo",
    "cross_entropy",
    "divergence",
    "dpo",
    "dppo",
    "dro",
    "entropy",
    "gmpo",
    "gold",
    "gspo",
    "importance_sampling",
    "kl",
    "kl_cov",
    "kto",
    "label_smoothing",
    "off_policy_sequence_mask",
    "orpo",
    "outlier_sequence",
    "ppo",
    "ppo_dual_clip",
    "reinforce",
    "rollout_is",
    "sapo",
    "sequence_mask",
    "simpo",
    "step_cross_entropy",
    "teacher_kl",
    "tis",
    "token_mask",
    "top_entropy",
    "top_k_divergence",
    "uld",
    "value_clip",
    "vespo",
    "z_loss",
]
