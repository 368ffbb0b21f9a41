"""Runs of skyrl-engine in MLflow."""
