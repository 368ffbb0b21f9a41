"""Reducers held to their promises."""
