"""Megatron-Core training backend for skyrl-engine."""
