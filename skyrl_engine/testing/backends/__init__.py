"""Backends held to their promises, and what they are tried on."""
