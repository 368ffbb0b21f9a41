"""Promises of corrections."""
