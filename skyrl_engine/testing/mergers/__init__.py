"""Promises of mergers."""
