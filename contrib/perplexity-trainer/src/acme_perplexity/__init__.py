"""A trainer for skyrl-engine that scores a dataset."""
