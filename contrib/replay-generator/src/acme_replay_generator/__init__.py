"""A generator for skyrl-engine that gives recorded rollouts again, in the place of a sampler."""
