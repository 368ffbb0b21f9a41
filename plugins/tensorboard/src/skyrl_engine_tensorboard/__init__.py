"""Runs of skyrl-engine in TensorBoard."""
