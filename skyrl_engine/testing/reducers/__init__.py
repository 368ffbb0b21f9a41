"""Promises of reducers."""
