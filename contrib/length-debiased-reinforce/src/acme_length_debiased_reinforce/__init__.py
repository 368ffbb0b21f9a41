"""REINFORCE with sequences weighted by a power of their length, for skyrl-engine."""
