"""Batches of loss-carrying tokens, and losses and corrections run on them."""
