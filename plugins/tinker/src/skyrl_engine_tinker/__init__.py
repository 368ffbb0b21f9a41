"""Serve a model to clients of the Tinker API."""
