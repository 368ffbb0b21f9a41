"""REINFORCE whose sequences are weighed by a power of their length, for skyrl-engine."""
