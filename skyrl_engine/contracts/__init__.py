"""Contracts: per kind, the Protocol a factory must return, and the value types that cross it. No torch at import."""
