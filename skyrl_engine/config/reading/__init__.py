"""Read configurations from files, mappings and command lines, with the origin of every key."""
