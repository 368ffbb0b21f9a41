"""One sample per row, prompt then response, flush right: one layout for SFT and RL."""
