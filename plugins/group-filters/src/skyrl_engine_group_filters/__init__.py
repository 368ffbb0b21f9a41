"""Group filters for skyrl-engine."""
