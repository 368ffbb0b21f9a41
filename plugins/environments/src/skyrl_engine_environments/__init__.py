"""Environments for skyrl-engine."""
