"""Losses held to their promises."""
