"""Focal cross-entropy for skyrl-engine, packaged as a third party would package it."""
