"""The promises of group filters: cases, checks and the pytest suite."""
