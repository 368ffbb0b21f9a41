"""Finding, resolving and loading plugins."""
