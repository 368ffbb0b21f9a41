"""Plans: from lengths alone, who goes into which mini-batch, rank, micro-batch and row. No torch."""
