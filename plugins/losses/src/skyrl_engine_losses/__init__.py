"""Loss functions for skyrl-engine: cross_entropy."""
