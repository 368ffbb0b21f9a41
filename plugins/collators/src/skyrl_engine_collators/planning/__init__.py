"""Plans: the mini-batch, rank, micro-batch and row of each sample, from lengths alone. Imports no torch."""
