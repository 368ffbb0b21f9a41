"""Attempts at tasks: sampled, answered by environments, recorded, and laid out as columns."""
