"""Promises of collators."""
