"""From datasets to sample columns."""
