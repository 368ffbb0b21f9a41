"""Generators: samplers of tokens, with the log-probabilities that they were sampled by."""
