"""Runs of skyrl-engine in Trackio."""
