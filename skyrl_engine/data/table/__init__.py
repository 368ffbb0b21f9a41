"""Hold tokenized samples in one Arrow table, and cache it."""
