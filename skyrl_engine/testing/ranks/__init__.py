"""Ranks for tests: processes in one process group, one way to start them and to call them."""
