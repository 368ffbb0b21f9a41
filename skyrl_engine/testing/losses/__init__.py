"""Promises of losses."""
