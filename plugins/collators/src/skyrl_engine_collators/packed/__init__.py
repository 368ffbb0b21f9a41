"""Several samples per row, one after the other: one row is one micro-batch of nearly `capacity` real tokens."""
