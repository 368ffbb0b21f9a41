"""Corrections held to their promises."""
