"""Training reward models."""
