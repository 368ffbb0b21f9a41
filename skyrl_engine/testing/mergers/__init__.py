"""Mergers held to their promises."""
