"""FSDP2 training backend for skyrl-engine."""
