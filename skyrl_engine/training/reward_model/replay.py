"""A step of a run of trainer reward_model, brought back."""

from functools import partial

from skyrl_engine.training.reward_model.trainer import start_reward_model
from skyrl_engine.training.sft.replay import replay_on_data

replay_reward_model = partial(replay_on_data, start_reward_model)
"""Bring a step of trainer reward_model back."""
