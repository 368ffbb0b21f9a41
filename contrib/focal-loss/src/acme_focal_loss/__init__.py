"""Focal cross-entropy for skyrl-engine, published the way an outsider would."""
