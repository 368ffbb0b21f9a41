"""The promises of environments."""
