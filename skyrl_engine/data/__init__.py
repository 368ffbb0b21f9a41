"""Read datasets into sample columns."""
