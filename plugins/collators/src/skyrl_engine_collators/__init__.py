"""Collators for skyrl-engine: padded."""
