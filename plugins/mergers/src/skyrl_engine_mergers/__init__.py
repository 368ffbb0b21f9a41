"""Output mergers for skyrl-engine: ordered, list."""
