"""A step of a run of trainer preference, brought back."""

from functools import partial

from skyrl_engine.training.preference.trainer import start_preference
from skyrl_engine.training.sft.replay import replay_on_data

replay_preference = partial(replay_on_data, start_preference)
"""Bring a step of trainer preference back."""
