"""Advantage estimators for skyrl-engine."""
