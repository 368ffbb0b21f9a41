"""Collators held to their promises."""
