"""Facts about a model that are read from its files, without torch."""
