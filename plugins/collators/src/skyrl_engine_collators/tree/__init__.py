"""Several samples per row, of which a prefix that they have in common is computed once: one row is one micro-batch."""
