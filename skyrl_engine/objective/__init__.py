"""Scores to the scalar to differentiate, and outputs; runs on ranks."""
