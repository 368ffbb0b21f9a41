"""Collators for skyrl-engine: padded and packed."""
