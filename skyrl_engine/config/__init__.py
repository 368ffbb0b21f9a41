"""Configuration: sources, structure, origins, reports."""
