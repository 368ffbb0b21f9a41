"""Promises of backends, and the models, batches and ranks that they are checked on."""
