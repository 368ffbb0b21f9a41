"""Trainers and the optimizer step they share."""
