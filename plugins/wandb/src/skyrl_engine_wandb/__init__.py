"""Runs of skyrl-engine in Weights & Biases."""
