"""Ranks for tests: processes in one process group."""
